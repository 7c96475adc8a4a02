"""Failed GPUs, the tensor-parallel widths that they leave to the replicas, and failures over time.

A cluster is cut into domains (GPUs joined by NVLink); a data-parallel replica is some whole domains, and runs in all of
them at the width, from a list, that its worst domain still has GPUs for. A width of 0: the replica does not run.
"""
import collections
import dataclasses
import heapq

# Unexpected interruptions of Llama 3's pre-training: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783).
FAILURES_PER_GPU_DAY = 419 / 54 / 16384
HOURS = 1 / 24
# (share of the failures, days until the GPU is back): 22 % are software, hardware takes three or five days.
REPAIR = ((0.39, 3), (0.39, 5), (0.22, 3 * HOURS))


@dataclasses.dataclass(frozen=True)
class Cluster:
    domains: int
    domain_gpus: int
    replica_domains: int

    @property
    def gpus(self):
        return self.domains * self.domain_gpus

    @property
    def replicas(self):
        return self.domains // self.replica_domains

    def with_spares(self, domains):
        return dataclasses.replace(self, domains=self.domains + domains)


def intact_share(gpus, failed_fraction):
    """The probability that none of so many GPUs has failed: the availability of a domain that needs them all."""
    return (1 - failed_fraction) ** gpus


def draw_failures(rng, cluster, events, radius=1):
    """{domain: failed GPUs} after so many failures, each of another aligned block of `radius` GPUs."""
    failed = collections.Counter()
    for block in rng.sample(range(cluster.gpus // radius), events):
        failed[block * radius // cluster.domain_gpus] += radius
    return failed


def replica_widths(failed, cluster, widths, packed=True):
    """{width: replicas that run at it}. packed: damaged domains share replicas, and the worst are left over where the
    domains are not a multiple of a replica; otherwise replicas are the domains in their order."""
    width_of = {count: max((width for width in widths if width <= cluster.domain_gpus - count), default=0)
                for count in set(failed.values())}
    if packed:
        damaged = sorted(width_of[count] for count in failed.values())
        worst = damaged[cluster.domains % cluster.replica_domains :: cluster.replica_domains]
    else:
        worst_of = {}
        for domain, count in failed.items():
            replica = domain // cluster.replica_domains
            worst_of[replica] = min(width_of[count], worst_of.get(replica, cluster.domain_gpus))
        worst = worst_of.values()
    replicas = collections.Counter(worst)
    replicas[cluster.domain_gpus] += cluster.replicas - len(worst)
    return replicas


def total_batch(replicas, local_batch):
    """What replicas of these widths process in one step: local_batch is {width: batch of a replica}."""
    return sum(count * local_batch.get(width, 0) for width, count in replicas.items())


def hourly_failures(rng, cluster, per_gpu_day=FAILURES_PER_GPU_DAY, repair=REPAIR, days=15):
    """Yields {domain: failed GPUs} at every hour from 0, when all is well: a Poisson process over the GPUs. It is one
    dict, kept up to date."""
    shares, durations = zip(*repair)
    rate = per_gpu_day * cluster.gpus
    failed, down, repairs = collections.Counter(), set(), []
    next_failure = rng.expovariate(rate)
    for hour in range(round(days / HOURS)):
        now = hour * HOURS
        while min(next_failure, repairs[0][0] if repairs else next_failure) <= now:
            if repairs and repairs[0][0] <= next_failure:
                gpu = heapq.heappop(repairs)[1]
                down.remove(gpu)
                domain = gpu // cluster.domain_gpus
                failed[domain] -= 1
                if not failed[domain]:
                    del failed[domain]
                continue
            gpu = rng.randrange(cluster.gpus)
            while gpu in down:
                gpu = rng.randrange(cluster.gpus)
            down.add(gpu)
            failed[gpu // cluster.domain_gpus] += 1
            heapq.heappush(repairs, (next_failure + rng.choices(durations, shares)[0], gpu))
            next_failure += rng.expovariate(rate)
        yield failed


def paused_shares(rng, cluster, spares, policies, wanted, **failures):
    """Share of the hours in which the batch of all replicas, spare domains among them, is below `wanted`: one number
    for each {width: batch of a replica}."""
    grown = cluster.with_spares(spares)
    hours, paused = 0, [0] * len(policies)
    for failed in hourly_failures(rng, grown, **failures):
        hours += 1
        for i, local_batch in enumerate(policies):
            paused[i] += total_batch(replica_widths(failed, grown, local_batch), local_batch) < wanted
    return [count / hours for count in paused]
