"""The loop of launch/supervise: an attempt, who died, the attempt after it."""
import dataclasses
import os
import pathlib
import shutil
import signal
import time

from supervision import verdict
from supervision.job import Metrics, Ranks
from supervision.layout import Layout, UserError, read_config
from supervision.verdict import CONFIG_CODE, DATA_CODE

FAILED_CODE, STOPPED_CODE, NOT_STARTED = 1, 75, (126, 127)
POLL_SECONDS = 0.05
AGAIN_SECONDS = 5  # a request to stop that came before the ranks could hear it is repeated
TOGETHER_SECONDS = 0.3  # between deaths that have one cause
STOP_SECONDS = 600  # that a job may take to save and end
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def say(text):
    print(f"supervise: {text}", flush=True)


def clock(seconds):
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds * 1000) % 1000:03}"


@dataclasses.dataclass
class Interruption:
    """From the death that ended an attempt to the first step of a later one."""
    what: str
    since: float
    last_step: int
    seconds: float = None  # to the first new step
    first_step: int = 0

    def outcome(self):
        if self.seconds is None:
            return "no step after it"
        repeated = max(0, self.last_step - self.first_step + 1)
        return (f"first new step {self.seconds:.1f} s after it: step {self.first_step}"
                + (f", {repeated} steps done again" if repeated else ""))


class Supervisor:
    def __init__(self, options, command, arguments):
        self.options, self.command, self.arguments = options, command, arguments
        config = read_config(command[2], arguments)
        self.layout = Layout.of(config)
        if not config["log.dir"]:
            raise UserError("log.dir must be given: its metrics.jsonl shows that the job lives")
        self.log = pathlib.Path(str(config["log.dir"]))
        self.saves = bool(config["checkpoint.every"] or config["checkpoint.dir"])
        self.metrics = Metrics(self.log / "metrics.jsonl")
        self.attempt = max((int(path.name[8:]) for path in self.log.glob("supervise/attempt_*")
                            if path.name[8:].isdigit()), default=0)
        self.places = []  # (host, GPU) of each rank, once an attempt has shown them
        self.hosts_chosen = False  # there are several hosts, so that later attempts must say where
        self.lost_gpus = {}
        self.interruptions = []
        self.fault = None  # (step, layout) of the last end without a death
        self.step = 0
        self.last_line = 0  # when metrics.jsonl grew, or the attempt began
        self.received = []  # signals

    def run(self):
        for number in SIGNALS:
            signal.signal(number, lambda received, _: self.received.append(received))
        if not self.saves:
            say("without checkpoint.every or checkpoint.dir each restart begins at the first step")
        try:
            code = self.attempts()
        finally:
            self.summarise()
        return code

    def attempts(self):
        while True:
            self.attempt += 1
            say(f"attempt {self.attempt}: {self.layout}")
            job = Ranks(self.folder(), self.layout, self.lost_gpus, self.chosen_hosts())
            hung, evidence = self.watch(job)
            code = self.judge(job, evidence or job.settled_records(), hung)
            if code is not None:
                return code
            if self.received:  # between two attempts
                return STOPPED_CODE if self.saves else 128 + self.received[0]

    def folder(self, suffix=""):
        return self.log / "supervise" / f"attempt_{self.attempt}{suffix}"

    def chosen_hosts(self):
        return [host for host, _ in self.places] if self.hosts_chosen else []

    def watch(self, job):
        """Whether the job hung, and the records of before it was ended here, if it was. It is over on return."""
        self.last_line = time.time()
        job.start(["--rank"], [*self.command, *self.layout.arguments(self.arguments)])
        try:
            return self.follow(job)
        finally:
            job.end()
            self.read_metrics()

    def follow(self, job):
        stopping = asked = None
        while job.running():
            now = time.monotonic()
            self.read_metrics()
            if self.received and stopping is None:
                stopping = now
                say(f"{signal.Signals(self.received[0]).name}: the job is told to {'save and ' * self.saves}end")
            if stopping is not None:
                if self.must_kill(now - stopping):
                    return False, None
                if asked is None or now - asked > AGAIN_SECONDS:
                    job.send(self.stop_signal())
                    asked = now
            if self.options.hang and time.time() - self.last_line > self.options.hang:
                say(f"no new line in {self.metrics.path} for {self.options.hang:g} s: ending the job")
                return True, job.ask()
            if job.has_died():  # mpirun takes two seconds to end the others
                time.sleep(TOGETHER_SECONDS)
                evidence = job.records()
                job.kill_ranks()
                return False, evidence
            time.sleep(POLL_SECONDS)
        return False, None

    def must_kill(self, waited):
        urgent = [number for number in self.received if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        return len(urgent) > 1 or waited > STOP_SECONDS

    def stop_signal(self):
        """mpirun kills what is not over a second after SIGTERM, which no save is."""
        if not self.saves:
            return signal.SIGTERM
        return signal.SIGUSR2 if self.received[0] == signal.SIGUSR2 else signal.SIGUSR1

    def read_metrics(self):
        lines = self.metrics.new_lines()
        if lines:
            self.last_line = time.time()
        steps = [line["step"] for line in lines if isinstance(line, dict) and "loss" in line]
        if not steps:
            return
        waiting = [interruption for interruption in self.interruptions if interruption.seconds is None]
        for interruption in waiting:
            interruption.seconds = time.time() - interruption.since
            interruption.first_step = steps[0]
        if waiting:
            say(f"{waiting[-1].what}: {waiting[-1].outcome()}")
        self.step = steps[-1]

    def judge(self, job, records, hung):
        """Exit code, or None to go on with self.layout as it is then."""
        code = job.code()
        if self.received:
            return code
        if not hung and code in (0, STOPPED_CODE):
            return code
        slots = self.layout.slots()
        training = set(range(len(slots))) - set(self.layout.idle())
        deaths = verdict.find_deaths(records, len(slots), training, job.said(), hung)
        if not deaths and not hung:
            refused = self.refused(job, records)
            if refused is not None:
                return refused
        self.remember_places(records)
        noticed = self.last_line if hung else verdict.first_sign(records)
        since = min((death.time for death in deaths if death.time), default=noticed)
        for death in deaths:
            say(f"dead: {self.describe(death.rank)}: {death.reason}"
                + (f" at {clock(death.time)}" if death.time else "") + f", after step {self.step}")
        if not deaths:
            say(f"{'the job hung' if hung else f'the job ended with exit code {code}'} after step {self.step}, and no "
                "rank is known to be dead")
        what = ", ".join(self.layout.name(slots[death.rank]) for death in deaths) or "the job"
        self.interruptions.append(Interruption(what, since, self.step))
        if len(self.interruptions) > self.options.max_restarts:
            say(f"giving up: --max-restarts {self.options.max_restarts}")
            return FAILED_CODE
        if not deaths and self.is_fault_again():
            say(f"giving up: two attempts in a row ended after step {self.step} without a dead rank")
            return FAILED_CODE
        return self.shrink([death.rank for death in deaths]) or self.check_health()

    def is_fault_again(self):
        """A layout that is still the same says that nobody died in between, in a health check either."""
        before, self.fault = self.fault, (self.step, self.layout)
        return self.fault == before

    def refused(self, job, records):
        """A failure that would only come again."""
        code = job.code()
        unshared = verdict.UNSHARED.search(job.said())
        if unshared:
            say(f"not restarted: {unshared[1]}")
            return CONFIG_CODE
        if code in (CONFIG_CODE, DATA_CODE, *NOT_STARTED):
            again = f" with {self.layout}" if self.interruptions else ""
            say(f"not restarted{again}: exit code {code} is of a "
                + {CONFIG_CODE: "config error", DATA_CODE: "data error"}.get(code, "program that cannot be started"))
            return code
        if not records and not self.interruptions:
            say("not restarted: the launcher started no rank")
            return code or FAILED_CODE
        return None

    def describe(self, rank):
        slots = self.layout.slots()
        host, gpu = self.places[rank] if rank < len(self.places) else ("unknown host", "?")
        return f"{self.layout.name(slots[rank])} (rank {rank}, host {host}, GPU {gpu})"

    def remember_places(self, records):
        if len(records) == len(self.layout.slots()):
            self.places = [(records[rank]["host"], records[rank]["gpu"]) for rank in sorted(records)]
        self.hosts_chosen = self.hosts_chosen or len({host for host, _ in self.places}) > 1

    def shrink(self, ranks):
        """Leaves these out. An exit code if too few are left, otherwise None."""
        slots = self.layout.slots()
        for rank in ranks:
            if rank < len(self.places):
                host, gpu = self.places[rank]
                self.lost_gpus[host] = sorted({*self.lost_gpus.get(host, []), gpu})
        self.places = [place for rank, place in enumerate(self.places) if rank not in ranks]
        self.layout = self.layout.without([slots[rank] for rank in ranks])
        if self.layout.training_widths():
            return None
        say(f"too few survivors: no replica has {max(1, self.layout.min_tensor)} of {self.layout.tensor} ranks left")
        return FAILED_CODE

    def check_health(self):
        """Leaves out what fails; an exit code if too few are left, otherwise None."""
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if self.options.health is None and (hidden or not shutil.which("nvidia-smi")):
            return None
        limit = self.options.health_seconds
        checks = Ranks(self.folder("_health"), self.layout, self.lost_gpus, self.chosen_hosts())
        checks.start(["--check", str(limit)], self.options.health or [])
        deadline = time.monotonic() + limit + STOP_SECONDS / 10
        try:
            while checks.running() and time.monotonic() < deadline and not self.received:
                time.sleep(POLL_SECONDS)
        finally:
            checks.end()
        if self.received:
            return None
        records = checks.records()
        self.remember_places(records)
        failed = []
        for rank in range(checks.size):
            record = records.get(rank, {})
            if not record.get("healthy"):
                failed.append(rank)
                say(f"dead: {self.describe(rank)}: health check: {record.get('said', 'no answer')}")
        return self.shrink(failed)

    def summarise(self):
        if self.interruptions:
            say(f"{len(self.interruptions)} interruptions; now {self.layout}")
        for interruption in self.interruptions:
            say(f"  {interruption.what} at {clock(interruption.since)}, after step {interruption.last_step}: "
                f"{interruption.outcome()}")
