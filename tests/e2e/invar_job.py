"""What the end-to-end tests share: starting invar alone or under mpirun, watching how it ends, and the files it eats.

The environment names the programs, INVAR and MPIRUN; CTest sets them.
"""
import array
import atexit
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "reference"
INVAR = os.environ.get("INVAR", str(ROOT / "build/cpu-release/bin/invar"))
MPIRUN = os.environ.get("MPIRUN", "mpirun")
LAUNCH = [MPIRUN, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
# What launchers tell their ranks: these tests may themselves run within a job of Slurm, MPI or torchrun.
OF_LAUNCHERS = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX(?!_MCA)|MPI|OMPI(?!_MCA|_ALLOW)|MV2|TORCHELASTIC)_|"
                          r"(RANK|(LOCAL_|GROUP_)RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|INVAR_LAUNCH)$")
# On the CPU, where several ranks can share a machine: GPUs are hidden.
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)},
               "OMP_NUM_THREADS": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "CUDA_VISIBLE_DEVICES": ""}

# A build with sanitizers is several times slower, and takes terabytes of addresses. INVAR_TEST_SLOWER multiplies every
# limit of time.
SANITIZED = bool(os.environ.get("INVAR_SANITIZE"))
SLOWER = (5 if SANITIZED else 1) * int(os.environ.get("INVAR_TEST_SLOWER", "1"))

# What is not over by then hangs: a slow or busy machine is no failure. What invar promises is PROMISED_SECONDS, which
# test_failures.py measures beside what this machine takes to start a job.
RUN_SECONDS = 300 * SLOWER
FAILURE_SECONDS = RUN_SECONDS
GONE_SECONDS = 60 * SLOWER  # until the processes of a job that is over are gone
PROMISED_SECONDS = 10

SEQUENCE = 16
VOCABULARY = 250

# Small, and with dims that divide unevenly: 16 units of vocabulary, 96 FFN columns and 4 KV groups over three ranks.
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
}
SMALL = {
    "model": MODEL,
    "numerics": {"precision": "fp32"},
    "train": {"steps": 6, "sequence_length": SEQUENCE, "micro_batch_size": 1, "global_batch_size": 4},
}


def to_yaml(sections):
    lines = []
    for name, section in sections.items():
        if not section:
            continue
        lines.append(f"{name}:")
        lines += [f"  {key}: {value}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def command(arguments, ranks=None):
    """ranks None: without mpirun."""
    launch = [] if ranks is None else [*LAUNCH, "-n", str(ranks)]
    return [*launch, INVAR, *map(str, arguments)]


class Outcome:
    def __init__(self, code, stdout, stderr, seconds):
        self.code, self.stdout, self.stderr, self.seconds = code, stdout, stderr, seconds

    @property
    def errors(self):
        return [line for line in self.stderr.splitlines() if line.startswith("invar: error:")]

    def __str__(self):
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def end(process):
    """Ends a process of ours and, if it is mpirun, lets it end its ranks first."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()


def read_lines(path):
    """Objects of a metrics.jsonl, without a line that is just being written; none as long as there is no file."""
    path = pathlib.Path(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def series(run_folder, key):
    return [line[key] for line in read_lines(pathlib.Path(run_folder) / "metrics.jsonl") if key in line]


def last_by_step(run_folder, key):
    """Step -> value of a metrics.jsonl. A resumed run repeats the steps that were lost: the later line counts."""
    lines = read_lines(pathlib.Path(run_folder) / "metrics.jsonl")
    return {line["step"]: line[key] for line in lines if key in line}


def tamper(path, name, change):
    """Replaces the bytes of one tensor of a safetensors file by what change(bytes) returns, of the same length."""
    data = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    first, last = json.loads(data[8:begin])[name]["data_offsets"]
    changed = change(bytes(data[begin + first:begin + last]))
    assert len(changed) == last - first
    data[begin + first:begin + last] = changed
    path.write_bytes(data)


def tamper_floats(path, name, change):
    """The same for a float32 tensor, whose values, one array of all rows, change(values) edits in place."""
    def edit(data):
        values = array.array("f", data)
        change(values)
        return values.tobytes()
    tamper(path, name, edit)


def write_tokens(path, tokens):
    with open(path, "wb") as file:
        array.array("H", tokens).tofile(file)


def read_safetensors_header(path):
    with open(path, "rb") as file:
        return json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))


class Pause:
    """A moment at which a job stands still, made by tests/support/pause_at.c: a call (write, fsync, rename) on a file
    whose path matches the pattern; of a write, one of bytes that contain `text`. It waits until release()."""

    LIBRARY = pathlib.Path(INVAR).resolve().with_name("pause_at.so")

    def __init__(self, folder, call, pattern, text=""):
        """folder: one of its own, which is made."""
        if not self.LIBRARY.exists():
            raise FileNotFoundError(f"{self.LIBRARY} is missing: build the target pause_at")
        self.folder = folder
        self.words = f"{folder}\t{call}\t{pattern}"
        folder.mkdir(parents=True)
        self.hold(text)

    def hold(self, text=""):
        """From now on at writes of this text; what waits for another one goes on."""
        (self.folder / "reached").unlink(missing_ok=True)
        (self.folder / "next").write_text(text)
        (self.folder / "next").rename(self.folder / "hold")

    def release(self):
        (self.folder / "hold").unlink()

    def reached(self):
        return (self.folder / "reached").exists()

    def signalled(self):
        """Whether the thread that waits has handled a signal. One that comes just when it looks for `hold` is not seen:
        who asks sends again."""
        return (self.folder / "signalled").exists()


@functools.cache
def without_blanks(path):
    """A link to the file, or the file. LD_PRELOAD takes a blank or a colon in its path for the end of a name."""
    if not re.search(r"[\s:]", str(path)):
        return path
    folder = tempfile.mkdtemp(prefix="invar_e2e_", dir="/tmp")
    atexit.register(shutil.rmtree, folder)
    link = pathlib.Path(folder) / path.name
    link.symlink_to(path)
    return link


def environment_with(pauses):
    """ENVIRONMENT for a job that is to stand still at these."""
    if not pauses:
        return ENVIRONMENT
    library = without_blanks(Pause.LIBRARY)
    return {**ENVIRONMENT, "LD_PRELOAD": str(library), "INVAR_PAUSES": "\n".join(pause.words for pause in pauses),
            "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}


def wait_until(condition, seconds):
    """Whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ranks_of(launcher_pid):
    """Ids of the invar processes that this mpirun started."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            parent = int(re.search(r"^PPid:\s+(\d+)", (entry / "status").read_text(), re.M).group(1))
            if parent == launcher_pid and os.readlink(entry / "exe") == os.path.realpath(INVAR):
                found.append(int(entry.name))
        except (OSError, AttributeError, ValueError):  # ended meanwhile, or not a process
            continue
    return sorted(found)


def is_alive(pid):
    try:
        return not re.search(r"^State:\s+[ZX]", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False


def ids_of(process):
    """Ids of the invar processes of a job: the launcher's ranks, or the process itself."""
    return ranks_of(process.pid) or [process.pid]


class JobTest(unittest.TestCase):
    """A folder of its own for every test, which is the working directory of the jobs it starts."""

    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="invar_e2e_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.numbers = itertools.count(1)  # of pauses

    def pause(self, call, pattern, text=""):
        """For jobs that are started with it in `pauses`; they go on when reach() and release() have been called."""
        return Pause(self.folder / "pauses" / str(next(self.numbers)), call, pattern, text)

    def pause_at_step(self, run, step):
        """Rank 0 is about to write the metrics of this step, the others go on until they need it."""
        return self.pause("write", f"*/{run}/metrics.jsonl", f'"step":{step},')

    def reach(self, pause, process):
        """Waits until the job stands still there."""
        wait_until(lambda: pause.reached() or process.poll() is not None, RUN_SECONDS)
        if not pause.reached():
            end(process)
            self.fail(f"did not come to {pause.words}\n{''.join(text or '' for text in process.communicate())}")

    def announce(self, pause, send):
        """Sends a signal to a launcher, again and again, until it has come to the rank that stands still, and lets that
        one go on."""
        def told():
            send()
            return wait_until(pause.signalled, 1)
        self.assertTrue(wait_until(told, RUN_SECONDS), "no signal came to the rank")
        pause.release()

    def check_gone(self, pids):
        self.assertTrue(wait_until(lambda: not any(map(is_alive, pids)), GONE_SECONDS), "processes are left over")

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return name

    def config(self, **sections):
        """Writes run.yaml: the small model, with these keys over it."""
        merged = {name: dict(section) for name, section in SMALL.items()}
        for name, section in sections.items():
            merged.setdefault(name, {}).update(section)
        return self.write("run.yaml", to_yaml(merged))

    def start(self, *arguments, ranks=None, in_child=None, pauses=()):
        """in_child: called in the new process before it becomes invar or mpirun."""
        process = subprocess.Popen(command(arguments, ranks), cwd=self.folder, env=environment_with(pauses), text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   preexec_fn=in_child)
        self.addCleanup(lambda: end(process) if process.poll() is None else None)
        return process

    def finish(self, process, since, seconds):
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            stdout, stderr = process.communicate()
            self.fail(f"did not end within {seconds} s: {process.args}\n{stdout}\n{stderr}")
        return Outcome(process.returncode, stdout, stderr, time.monotonic() - since)

    def run_invar(self, *arguments, ranks=None, seconds=RUN_SECONDS, in_child=None):
        since = time.monotonic()
        return self.finish(self.start(*arguments, ranks=ranks, in_child=in_child), since, seconds)

    def succeed(self, *arguments, ranks=None):
        outcome = self.run_invar(*arguments, ranks=ranks)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.errors, [], outcome)
        return outcome

    def check_failure(self, outcome, code, *texts, hint=True):
        """One message that says all of texts and ends with a hint, this exit code, and no trace of C++."""
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(len(outcome.errors), 1, outcome)
        message = outcome.errors[0] + "\n"
        following = outcome.stderr.splitlines()[outcome.stderr.splitlines().index(outcome.errors[0]) + 1:]
        if following and following[0].startswith("  hint: "):
            message += following[0]
        elif hint:
            self.fail(f"no hint under the message\n{outcome}")
        for text in texts:
            self.assertIn(text, message, outcome)
        for trace in ("terminate called", "what():", "Process received signal", "Signal code", "Segmentation",
                      "Sanitizer", "basic_string", "std::"):
            self.assertNotIn(trace, outcome.stderr, outcome)

    def fail_with(self, code, *texts, arguments, ranks=None, hint=True):
        outcome = self.run_invar(*arguments, ranks=ranks, seconds=FAILURE_SECONDS)
        self.check_failure(outcome, code, *texts, hint=hint)
        return outcome

    def train(self, name, *overrides, ranks=None, config="run.yaml"):
        """Trains into the folder `name`; its losses."""
        self.succeed("train", config, f"log.dir={name}", *overrides, ranks=ranks)
        return series(self.folder / name, "loss")
