"""Who is dead: from what the ranks wrote down, what they and the launcher said, and in which order."""
import dataclasses
import re
import signal
import time

# What an operating system or a machine does to a process. SIGABRT is a program's own doing.
DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}

# invar's exit codes for a config and for data that cannot be used: the file is at fault, and no machine.
CONFIG_CODE, DATA_CODE = 2, 3

# Open MPI and Slurm about hosts, and Open MPI about ranks whose wrapper could not write.
HOST_LOST = (re.compile(r"Remote daemon: +\S+ on node (\S+)"), re.compile(r"srun: error: Node failure on (\S+)"))
RANK_LOST = re.compile(r"noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")

# What a rank says of its own device; what it says of peers ("remote process exited") is a consequence.
BROKEN_DEVICE = re.compile(
    r"rank (\d+): .*(the device does not answer|uncorrectable ECC|hardware stack error|unhandled cuda error|"
    r"unspecified launch failure|no CUDA-capable device|GPU is lost|fallen off the bus|unknown error)")
# Printed by every rank that waits in vain for GPUs (app/rank_device.cpp): the one that does not say so is awaited. One
# that waits in host memory asks the others and names who does not answer (lib/comm/mpi_waiting.cpp).
WAITS = re.compile(r"\brank (\d+): .*: not done [\d.]+ s after it was queued")
NO_ANSWER = re.compile(r": not done [\d.]+ s after it began: no answer from ranks? ((?:\d+|, | and )+)")
# Of a wrapper (rank.py) whose host does not see the folder of the attempt.
UNSHARED = re.compile(r"launch/supervise: (host \S+ does not see .*)")


@dataclasses.dataclass
class Death:
    rank: int
    reason: str
    time: float = 0  # 0: unknown


def died_of_signals(records):
    """Before anybody told them to end."""
    return [Death(rank, f"killed by {signal.Signals(record['signal']).name}", record["end"])
            for rank, record in records.items()
            if record.get("signal") in DEADLY and not record.get("told") and not record.get("orphaned")]


def did_not_answer(records, ranks):
    """Of a job that hangs, ranks that are stopped or whose wrapper is silent; nobody if all are."""
    deaths = []
    for rank in range(ranks):
        record = records.get(rank, {})
        answer = record.get("answer")
        if "end" in record or answer == "R":
            continue
        reason = {"T": "stopped", "D": "stuck in the kernel"}.get(answer, "does not answer")
        deaths.append(Death(rank, reason, record.get("stopped") or 0))
    return deaths if len(deaths) < ranks else []


def lost_hosts(records, text):
    hosts = {host for pattern in HOST_LOST for host in pattern.findall(text)}
    return [Death(rank, f"host {record['host']} is gone") for rank, record in records.items()
            if record["host"] in hosts or record["host"].split(".")[0] in hosts]


def lost_by_launcher(records, text):
    deaths = lost_hosts(records, text)
    for rank, number in RANK_LOST.findall(text):
        record = records.get(int(rank), {})
        if int(number) in DEADLY and not record.get("told") and "end" not in record:
            deaths.append(Death(int(rank), f"killed by {signal.Signals(int(number)).name}"))
    return deaths


def vanished(records):
    """Begun, and no word of their end, although others have ended or were told to. After the fault of another rank a
    whole host without a word is rather one whose records come late."""
    heard = {rank for rank, record in records.items() if {"end", "told"} & set(record)}
    faulted = any("end" in record and not record.get("told") for record in records.values())
    hosts = {records[rank]["host"] for rank in heard}
    silent = [rank for rank in sorted(set(records) - heard) if not faulted or records[rank]["host"] in hosts]
    return [Death(rank, "vanished") for rank in silent] if heard else []


def awaited(text, training):
    """The only training rank that does not answer or report. Of several silent ones most would have reported later: those
    that report first end the job."""
    waiting = {int(rank) for rank in WAITS.findall(text)} & training
    asked = [{int(rank) for rank in re.findall(r"\d+", ranks)} for ranks in NO_ANSWER.findall(text)]
    for unanswered in asked:
        waiting |= training - unanswered
    silent = training - waiting
    sure = len(silent) == 1 and (asked or len(waiting) > 1)
    return [Death(rank, "the others wait for it") for rank in silent] if sure else []


def first_sign(records):
    """When the first rank ended or was told to."""
    return min((record[key] for record in records.values() for key in ("end", "told") if record.get(key)),
               default=time.time())


def refused_at(records):
    """When the first rank ended by itself because of its config or data; None if none did."""
    return min((record["end"] for record in records.values()
                if record.get("code") in (CONFIG_CODE, DATA_CODE) and not record.get("told")), default=None)


def evidence(records, ranks, training, text, hung):
    """Yields the deaths that each kind of evidence tells of, the surest kind first."""
    refused = refused_at(records)
    if refused is not None:  # what becomes of other ranks from then on says nothing about their machines
        yield [death for death in died_of_signals(records) if death.time < refused]
        yield lost_hosts(records, text)
        return
    if hung:
        yield did_not_answer(records, ranks)
    yield died_of_signals(records)
    yield lost_by_launcher(records, text)
    broken = {int(rank): what for rank, what in BROKEN_DEVICE.findall(text)}
    yield [Death(rank, what) for rank, what in sorted(broken.items()) if rank < ranks]
    yield awaited(text, training)
    yield vanished(records)


def find_deaths(records, ranks, training, text, hung):
    """The first kind of evidence that says something counts: what comes later may be its consequence."""
    deaths = next(filter(None, evidence(records, ranks, training, text, hung)), [])
    return sorted(deaths, key=lambda death: (death.time, death.rank))
