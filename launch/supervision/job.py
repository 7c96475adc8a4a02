"""Starting the ranks of one attempt, watching them, and leaving none of them behind."""
import collections
import contextlib
import itertools
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

from supervision.layout import UserError
from supervision.rank import PR_SET_PDEATHSIG, process_state, write_json

END_SECONDS = 10  # that a launcher has to end its ranks
ANSWER_SECONDS = 20  # all answer within two on a host that is not busy, and then nobody waits for more
RECORD_SECONDS, FAR_RECORD_SECONDS = 2, 10  # until a record is seen here: of one host, of several
# Containers, as in launch/mpirun.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
HOST_OPTIONS = {"--hostfile", "-hostfile", "--machinefile", "-machinefile", "--host", "-host", "-H"}
ORDER_OPTIONS = {"--map-by", "-map-by", "--rank-by", "-rank-by"}


def find_launcher():
    """Words before -n: mpirun's, of MPIRUN, or those of srun, by INVAR_LAUNCH or within a Slurm job."""
    default = "srun" if "SLURM_JOB_ID" in os.environ and "MPIRUN" not in os.environ else "mpirun"
    kind = os.environ.get("INVAR_LAUNCH", default)
    if kind == "srun":
        return kind, ["srun", "--mpi=pmix", "--cpu-bind=cores", "--kill-on-bad-exit=1"]
    if kind != "mpirun":
        raise UserError(f"INVAR_LAUNCH is srun or mpirun, not {kind}")
    return kind, shlex.split(os.environ.get("MPIRUN", "mpirun --oversubscribe --bind-to none"))


def on_hosts(kind, words, hosts, folder):
    """The launcher's words, and variables for it, that put the ranks on these hosts, one for each rank in order. Where
    mpirun is not to fill one host after the other, seq takes the place of --map-by and --rank-by."""
    path = folder / "hosts"
    if kind == "srun":
        path.write_text("".join(f"{host}\n" for host in hosts))
        return [*words, "--distribution=arbitrary"], {"SLURM_HOSTFILE": str(path)}
    by_node = any(option in ORDER_OPTIONS and "node" in order for option, order in zip(words, words[1:]))
    if by_node or len(list(itertools.groupby(hosts))) > len(set(hosts)):
        path.write_text("".join(f"{host}\n" for host in hosts))
        return [*without_options(words, HOST_OPTIONS | ORDER_OPTIONS), "--map-by", "seq", "--hostfile", str(path)], {}
    path.write_text("".join(f"{host} slots={count}\n" for host, count in collections.Counter(hosts).items()))
    return [*without_options(words, HOST_OPTIONS), "--hostfile", str(path)], {}


def without_options(words, options):
    """Nor their values."""
    kept = []
    skip = False
    for word in words:
        if not skip and word not in options:
            kept.append(word)
        skip = not skip and word in options
    return kept


class Metrics:
    """Complete lines that are new in a metrics.jsonl."""

    def __init__(self, path):
        self.path = path
        self.inode, self.offset = self.identity()

    def identity(self):
        try:
            found = os.stat(self.path)
        except OSError:
            return None, 0
        return found.st_ino, found.st_size

    def new_lines(self):
        inode, size = self.identity()
        if inode != self.inode:  # moved aside by a run that starts anew
            self.inode, self.offset = inode, 0
        self.offset = min(self.offset, size)  # a torn line was removed
        if inode is None or size == self.offset:
            return []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                text = file.read()
        except OSError:
            return []
        end = text.rfind(b"\n") + 1
        self.offset += end
        lines = []
        for line in text[:end].splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # the rest of a line that was torn
                continue
        return lines


class Ranks:
    """A launched set of wrappers: of one attempt, or of the health checks before it."""

    def __init__(self, folder, layout, lost_gpus, hosts):
        """hosts: of each rank, or empty for the launcher's own choice."""
        self.folder, self.size = pathlib.Path(folder), len(layout.slots())
        self.folder.mkdir(parents=True)
        plan = {"slots": layout.slots(), "idle": layout.idle(), "lost_gpus": lost_gpus}
        write_json(self.folder / "plan.json", plan)
        self.kind, self.words = find_launcher()
        self.variables = {}
        if hosts:
            self.words, self.variables = on_hosts(self.kind, self.words, hosts, self.folder)
        self.process = None
        self.killed = {}  # rank -> when it was killed here

    def start(self, mode, command):
        """mode: of launch/supervise, for a rank."""
        script = pathlib.Path(__file__).resolve().parents[1] / "supervise"
        environment = {**os.environ, **{key: value for key, value in ENVIRONMENT.items() if key not in os.environ},
                       **self.variables}
        words = [*self.words, "-n", str(self.size), sys.executable, "-S", "-B", str(script), *mode,
                 str(self.folder.resolve()), "--", *command]
        try:
            self.process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                            start_new_session=True, preexec_fn=end_with_parent)
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}") from None
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        """Standard error goes through to ours, and to a file for later."""
        with open(self.folder / "stderr.txt", "wb", buffering=0) as copy:
            while piece := self.process.stderr.read1(65536):
                copy.write(piece)
                with contextlib.suppress(OSError):  # nobody listens; the job must not wait for that
                    os.write(sys.stderr.fileno(), piece)

    def has_died(self):
        """A rank has been killed, and the launcher will notice."""
        return (self.folder / "died").exists()

    def running(self):
        return self.process.poll() is None

    def send(self, number):
        if self.running():
            self.process.send_signal(number)

    def records(self):
        """Rank -> what its wrapper wrote down."""
        found = {}
        for path in self.folder.glob("rank_*.json"):
            record = json.loads(path.read_text())
            if record["rank"] in self.killed and "end" not in record:
                record.setdefault("told", self.killed[record["rank"]])
            found[record["rank"]] = record
        return found

    def ask(self):
        """Records in which every wrapper says how its child is; one that is stopped or gone does not."""
        (self.folder / "asked").touch()
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and self.running():
            if sum(bool({"answer", "end"} & set(record)) for record in self.records().values()) == self.size:
                break
            time.sleep(0.1)
        return self.records()

    def end(self):
        """Afterwards nothing of the job runs on this host; on others the launcher's daemons see to that."""
        self.send(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_group(self.process.pid)
            self.process.wait()
        self.reader.join(1)  # a rank that lives on holds the pipe
        self.kill_ranks()
        self.reader.join(END_SECONDS)

    def kill_ranks(self):
        here = socket.gethostname()
        for record in self.records().values():
            for name in ("wrapper", "pid") if record["host"] == here else ():
                state = process_state(record[name]) if name in record else None
                if state is not None and state[1] == record[f"{name}_start"] and state[0] not in "ZX":
                    self.killed.setdefault(record["rank"], time.time())
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(record[name], signal.SIGKILL)

    def settled_records(self):
        """After the end: complete, or as complete as they get."""
        start = time.monotonic()
        while True:
            records = self.records()
            known = sum(bool({"end", "told"} & set(record)) for record in records.values())
            several = len({record["host"] for record in records.values()}) > 1
            limit = FAR_RECORD_SECONDS if several else RECORD_SECONDS
            if known == self.size or (known == 0 and not several) or time.monotonic() > start + limit:
                return records
            time.sleep(0.1)

    def said(self):
        """Standard error of the launcher and all ranks."""
        return (self.folder / "stderr.txt").read_text(errors="replace")

    def code(self):
        """Of the launcher, as a shell has it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code


def kill_group(leader):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def end_with_parent():
    import ctypes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
