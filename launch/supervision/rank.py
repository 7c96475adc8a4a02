"""One rank of a supervised job: starts invar as a child and writes down how it goes (attempt_K/rank_R.json)."""
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED = {*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
POLL_SECONDS = 0.5
SAMPLES, SAMPLE_SECONDS = 5, 0.2  # of a child's state: one that is in state D each time does not just read a file
PR_SET_PDEATHSIG = 1
NOT_STARTED = 126


def from_environment(*names):
    """The first of these variables that is a number; None without."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None)


def write_json(path, content):
    """All of it or nothing, for readers too."""
    pending = f"{path}.{os.getpid()}.tmp"
    with open(pending, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(pending, path)


def process_state(pid):
    """(state letter, start in clock ticks) of /proc; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def visible_gpus(lost):
    """What CUDA_VISIBLE_DEVICES must be without the lost GPUs; None: as it is. A launcher that shows every rank its own
    GPU has chosen already."""
    if not lost or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not shown:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        shown = [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]
    return [name for name in shown if name not in lost] if len(shown) > 1 else None


def gpus_of_driver():
    """How many GPUs this host has; 0 if its driver does not tell."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


class Rank:
    def __init__(self, folder):
        self.folder = folder
        self.host = socket.gethostname()
        try:
            with open(os.path.join(folder, "plan.json"), encoding="utf-8") as file:
                self.plan = json.load(file)
        except FileNotFoundError:
            print(f"launch/supervise: host {self.host} does not see {folder}/plan.json: log.dir "
                  f"({os.path.dirname(os.path.dirname(folder))}) must be in a folder that all hosts share, at one path",
                  file=sys.stderr)
            sys.exit(NOT_STARTED)
        self.rank = from_environment("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "PMI_RANK")
        self.local_rank = from_environment("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")
        if self.rank is None or self.local_rank is None:
            sys.exit("launch/supervise: --rank is for ranks that mpirun or srun starts")
        self.environment = dict(os.environ)
        live = visible_gpus(self.plan["lost_gpus"].get(self.host, []))
        if live is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(live)
        self.record = {"rank": self.rank, "host": self.host, "local_rank": self.local_rank, "gpu": self.gpu(),
                       "wrapper": os.getpid(), "wrapper_start": process_state(os.getpid())[1]}

    def gpu(self):
        """The name under which CUDA_VISIBLE_DEVICES knows the GPU of this rank. Ranks that share GPUs take them in turn."""
        shown = [name for name in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        shown = shown or [str(index) for index in range(gpus_of_driver())]
        return shown[self.local_rank % len(shown)] if shown else str(self.local_rank)

    def write(self, **fields):
        self.record.update(fields)
        write_json(os.path.join(self.folder, f"rank_{self.rank}.json"), self.record)

    def start(self, command):
        idle = self.rank in self.plan["idle"]
        libc = ctypes.CDLL(None, use_errno=True)

        def in_child():
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # whatever becomes of this wrapper
            if idle:  # it waits in MPI without the handlers of a run, and must not die of a request to save
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

        self.parent = os.getppid()
        try:
            self.process = subprocess.Popen(command, env=self.environment, preexec_fn=in_child)  # kept: its end reaps
        except OSError as error:
            self.write(start=time.time(), end=time.time(), code=127)
            sys.exit(f"launch/supervise: {command[0]}: {error.strerror}")
        self.child = self.process.pid
        self.write(pid=self.child, pid_start=(process_state(self.child) or ("", 0))[1], start=time.time())

    def run(self):
        """The child's exit code, or 128 + the signal that it died of."""
        asked = os.path.join(self.folder, "asked")
        answered = False
        while True:
            received = signal.sigtimedwait(WATCHED, POLL_SECONDS)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self.pass_on(received.si_signo)
            code = self.look_at_child()
            if code is not None:
                return code
            if os.getppid() != self.parent:  # the launcher is gone
                self.write(told=self.record.get("told") or time.time(), orphaned=True)
                os.kill(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
                return 128 + signal.SIGKILL
            if not answered and os.path.exists(asked):
                self.write(answer=self.sampled_state())
                answered = True

    def pass_on(self, number):
        """`told` is written first: the launcher kills soon after, and this is not a death."""
        if number in ENDING and "told" not in self.record:
            self.write(told=time.time())
        os.kill(self.child, number)

    def look_at_child(self):
        pid, status = os.waitpid(self.child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self.write(stopped=time.time())
        elif os.WIFCONTINUED(status):
            self.write(stopped=None)
        elif os.WIFSIGNALED(status):
            self.write(end=time.time(), signal=os.WTERMSIG(status))
            if "told" not in self.record:
                open(os.path.join(self.folder, "died"), "w", encoding="utf-8").close()
            return 128 + os.WTERMSIG(status)
        else:
            self.write(end=time.time(), code=os.WEXITSTATUS(status))
            return os.WEXITSTATUS(status)
        return None

    def sampled_state(self):
        """T: stopped, D: in the kernel all the time, otherwise R."""
        states = set()
        for _ in range(SAMPLES):
            states.add((process_state(self.child) or ("X", 0))[0])
            time.sleep(SAMPLE_SECONDS)
        return next((state for state in "TtD" if states == {state}), "R").upper()


def run(folder, command):
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # before anything is written: from then on an end is told
    rank = Rank(folder)
    rank.start(command)
    return rank.run()


def check(folder, command, seconds):
    """The health check of one rank's slot. command None: the GPU answers."""
    rank = Rank(folder)
    slot = rank.plan["slots"][rank.rank]
    command = [*command, str(slot)] if command else ["nvidia-smi", f"--id={rank.gpu()}", "--query-gpu=uuid",
                                                     "--format=csv,noheader"]
    rank.write()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=seconds)
        healthy, said = done.returncode == 0, done.stdout.strip()[-500:] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        healthy, said = False, f"no answer in {seconds:g} s"
    except OSError as error:
        healthy, said = False, f"{command[0]}: {error.strerror}"
    rank.write(healthy=healthy, said=said)
    return 0
