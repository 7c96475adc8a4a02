"""The numbers that the simulator must reproduce, and how near.

They are of 32,768 GPUs in 1,024 domains of 32, 8 domains a replica, a local batch of 8, and come from another program
of the same rules (200 draws, 60 traces, 20 traces with a fixed batch), so they have a sampling error of their own.
"""
import math
import random
import statistics
from collections import namedtuple

from failures import model

CLUSTER = model.Cluster(domains=1024, domain_gpus=32, replica_domains=8)
FULL = 8
DROP = {32: 8}
NTP_76, NTP_65, IDEAL = {32: 8, 30: 7, 28: 6}, {32: 8, 30: 6, 28: 5}, {32: 8, 30: 7.5, 28: 7}
NTP_765 = {**NTP_76, 24: 5}
ERRORS = 3  # the band is so many standard errors of the difference, and the rounding of the number itself
RARE_PAUSE = 1 / (20 * 15)  # and for the time paused a day in one of the 20 traces: rare pauses have no normal spread

SLOW, MIXED, ALL_SLOW = ((0.78, 5), (0.22, 0.125)), model.REPAIR, ((1, 5),)

# failed fraction: % of domains damaged, then loss in % by policy
STATIC = {
    0.0005: ("1.55", "1.56", "11.8", "0.20", "0.39", "0.10"),
    0.001: ("3.17", "3.57", "22.8", "0.45", "0.89", "0.22"),
    0.002: ("6.24", "6.58", "40.2", "0.82", "1.65", "0.41"),
    0.003: ("9.13", "9.39", "53.6", "1.19", "2.36", "0.59"),
    0.004: ("12.00", "12.42", "64.0", "1.58", "3.13", "0.79"),
}
STATIC_POLICIES = (("drop packed", DROP, True), ("drop unpacked", DROP, False), ("NTP 7/6", NTP_76, True),
                   ("NTP 6/5", NTP_65, True), ("NTP ideal", IDEAL, True))
# GPUs of an event: loss in % by NTP and by dropping for 33 events, by dropping for 33 GPUs
BLAST = {1: ("0.45", "3.6", "3.61"), 2: ("0.49", "3.6", "1.56"), 4: ("0.94", "3.6", "0.78"), 8: ("1.52", "3.6", "0.78")}
# repair, times the rate: share of time above 0.1 % failed, mean peak, availability of 64 GPUs at the peak
TRACES = {
    "78 % 3 d, 22 % 3 h": (((0.78, 3), (0.22, 0.125)), 1, (".61", "48", ".910")),
    "78 % 5 d, 22 % 3 h": (SLOW, 1, (".825", "73", ".867")),
    "78 % 3 or 5 d, 22 % 3 h": (MIXED, 1, (".805", "60", ".889")),
    "the same, twice the rate": (MIXED, 2, (".91", "113", ".801")),
    "the same, three times": (MIXED, 3, (".94", "166", ".722")),
    "all 5 d": (ALL_SLOW, 1, (".86", "90", ".839")),
}
# policy: spare domains: share of time paused for 78 % 5 d + 22 % 3 h, for all 5 d
PAUSED = {
    "NTP 7/6": (NTP_76, {0: (".995", ".995"), 8: (".163", ".62"), 12: (".087", ".51"), 16: (".000", ".000")}),
    "NTP 6/5": (NTP_65, {16: (".174", ".64"), 20: (".100", ".52"), 24: (".000", ".009")}),
    "drop packed": (DROP, {64: (".244", ".69"), 80: (".017", ".30"), 88: (".002", ".14"), 96: (".000", ".03")}),
}
# failed fraction: availability of 8, 16, 32, 64 and 72 GPUs
INTACT = {0.001: (".992", ".984", ".9685", ".938", ".9305"), 0.004: (".968", ".938", ".880", ".774", ".749")}

Result = namedtuple("Result", "name value expected band")


def judge(name, samples, expected, expected_samples, rare=0.0):
    """samples: one value of each draw; expected: text, whose last digit is rounded; rare: added to the band."""
    decimals = len(expected.partition(".")[2])
    spread = statistics.stdev(samples) if len(samples) > 1 else 0
    band = 0.5 * 10**-decimals + ERRORS * spread * math.sqrt(1 / len(samples) + 1 / expected_samples) + rare
    return Result(name, statistics.fmean(samples), expected, band)


def inside(result):
    return abs(result.value - float(result.expected)) <= result.band * (1 + 1e-9)


def loss_percent(failed, local_batch, packed=True):
    batch = model.total_batch(model.replica_widths(failed, CLUSTER, local_batch, packed), local_batch)
    return 100 * (1 - batch / (CLUSTER.replicas * FULL))


def static(rng, draws):
    for fraction, expected in STATIC.items():
        drawn = [model.draw_failures(rng, CLUSTER, round(fraction * CLUSTER.gpus)) for _ in range(draws)]
        damaged = [100 * len(failed) / CLUSTER.domains for failed in drawn]
        yield judge(f"{fraction:.2%} failed: domains damaged, %", damaged, expected[0], 200)
        for (name, local_batch, packed), number in zip(STATIC_POLICIES, expected[1:]):
            losses = [loss_percent(failed, local_batch, packed) for failed in drawn]
            yield judge(f"{fraction:.2%} failed: loss of {name}, %", losses, number, 200)


def blast(rng, draws):
    for radius, expected in BLAST.items():
        events = [model.draw_failures(rng, CLUSTER, 33, radius) for _ in range(draws)]
        dead = [model.draw_failures(rng, CLUSTER, 33 // radius, radius) for _ in range(draws)]
        for name, drawn, local_batch, number in (("33 events: loss of NTP 7/6/5", events, NTP_765, expected[0]),
                                                 ("33 events: loss of drop packed", events, DROP, expected[1]),
                                                 ("33 GPUs: loss of drop packed", dead, DROP, expected[2])):
            yield judge(f"blast radius {radius}, {name}, %", [loss_percent(f, local_batch) for f in drawn], number, 200)


def traces(rng, runs):
    for name, (repair, times, expected) in TRACES.items():
        above, peaks = [], []
        for _ in range(runs):
            counts = [sum(failed.values()) for failed in model.hourly_failures(
                rng, CLUSTER, times * model.FAILURES_PER_GPU_DAY, repair)]
            above.append(statistics.fmean(count > 0.001 * CLUSTER.gpus for count in counts))
            peaks.append(max(counts))
        yield judge(f"{name}: time above 0.1 % failed", above, expected[0], 60)
        yield judge(f"{name}: GPUs failed at the peak", peaks, expected[1], 60)
        intact = [model.intact_share(64, peak / CLUSTER.gpus) for peak in peaks]
        yield judge(f"{name}: 64 GPUs intact then", intact, expected[2], 60)


def paused(rng, runs, table=None):
    for name, (local_batch, rows) in (table or PAUSED).items():
        for spares, expected in rows.items():
            for repair, label, number in zip((SLOW, ALL_SLOW), ("78 % 5 d", "all 5 d"), expected):
                shares = [model.paused_shares(rng, CLUSTER, spares, [local_batch], CLUSTER.replicas * FULL,
                                              repair=repair)[0] for _ in range(runs)]
                yield judge(f"{name}, {spares} spare domains, {label}: time paused", shares, number, 20, RARE_PAUSE)


def intact(_rng, _runs):
    for fraction, expected in INTACT.items():
        for gpus, number in zip((8, 16, 32, 64, 72), expected):
            yield judge(f"{fraction:.1%} failed: {gpus} GPUs intact", [model.intact_share(gpus, fraction)], number, 1)


# section, draws or runs of it
SECTIONS = ((static, 1000), (blast, 1000), (traces, 200), (paused, 60), (intact, 1))


def run(seed):
    """Yields a Result for every number."""
    for section, samples in SECTIONS:
        yield from section(random.Random(seed), samples)
