"""What a replica of some tensor-parallel width can do: the measured time of a step, and the batches that follow."""
import bisect
import collections
import csv
import heapq
import itertools
import statistics

HEADER = ["width", "micro_batches", "ms_per_step"]


class InputError(Exception):
    """Input that cannot be used; the message is for a person."""


def read_points(path):
    """{width: [(micro-batches, ms), ...]}, both ascending; of several lines for a point the median counts."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip() and line.lstrip()[0] != "#"]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file") from error
    rows = [[cell.strip() for cell in row] for row in csv.reader(line for _, line in lines)]
    if not rows or rows[0] != HEADER:
        raise InputError(f"{path}: the first line must be {','.join(HEADER)}")
    samples = collections.defaultdict(list)
    for (number, _), row in zip(lines[1:], rows[1:]):
        try:
            width, micro_batches, ms = int(row[0]), int(row[1]), float(row[2])
            if len(row) != len(HEADER) or min(width, micro_batches) < 1 or not 0 < ms < float("inf"):
                raise ValueError
        except (ValueError, IndexError):
            raise InputError(f"{path}, line {number}: expected a width and a number of micro-batches from 1 up and the "
                             f"milliseconds of a step, not '{','.join(row)}'") from None
        samples[width, micro_batches].append(ms)
    points = collections.defaultdict(list)
    for (width, micro_batches), times in sorted(samples.items()):
        points[width].append((micro_batches, statistics.median(times)))
    check_points(path, points)
    return dict(points)


def check_points(path, points):
    if len(points) < 2:
        raise InputError(f"{path}: needs the full width and at least one narrower; it has {len(points)} width")
    for width, times in points.items():
        if len(times) < 2:
            raise InputError(f"{path}: width {width} needs step times of at least two numbers of micro-batches")
        for (fewer, less), (more, ms) in zip(times, times[1:]):
            if ms <= less:
                raise InputError(f"{path}: at width {width}, {more} micro-batches take {ms:g} ms and {fewer} take "
                                 f"{less:g}: more must take longer; measure more steps")


def between(xs, ys, x):
    """On the line through the two points around x, or through the nearest two beyond the ends."""
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class Measured:
    """Step times of a replica in a domain of `domain` GPUs. The largest measured width is a whole domain; a domain of
    another size takes, at the same share of its GPUs, the same time (an extrapolation), and between two measured shares
    what is linear in the work per GPU, 1 / share."""

    def __init__(self, points, domain, micro_batches=None):
        full = max(points)
        self.domain, self.points, self.measured = domain, points, domain == full
        self.inverse_shares = sorted(full / width for width in points)
        narrowest = -(-min(points) * domain // full)
        widths = points if self.measured else range(domain, narrowest - 1, -2 if domain >= 16 else -1)
        self.widths = sorted(widths, reverse=True)
        self.micro_batches = micro_batches or points[full][-1][0]
        self.step_ms = self.ms(domain, self.micro_batches)
        self.local_batch = {width: self.largest_batch(width) for width in self.widths}
        self.known = {}

    def ms(self, width, micro_batches):
        by_width = [between(*zip(*times), micro_batches) for _, times in sorted(self.points.items(), reverse=True)]
        return between(self.inverse_shares, by_width, self.domain / width)

    def largest_batch(self, width):
        """The most micro-batches whose step takes no longer than that of a healthy replica."""
        limit = self.step_ms * (1 + 1e-9)  # equal times, but for rounding, are no longer
        return next(m for m in itertools.count() if self.ms(width, m + 1) > limit)

    def kept_batch_ms(self, replicas, total):
        """A step of `total` micro-batches over replicas {width: count}, each micro-batch given to the replica that has
        the least time with it: all replicas of a width come before the next micro-batch of one of them."""
        key = (total, *sorted(replicas.items()))
        if key not in self.known:
            nexts = [(self.ms(width, 1), 1, width) for width, count in replicas.items() if width and count]
            heapq.heapify(nexts)
            placed, ms = 0, float("inf")
            while nexts and placed < total:
                ms, given, width = nexts[0]
                placed += replicas[width]
                heapq.heapreplace(nexts, (self.ms(width, given + 1), given + 1, width))
            self.known[key] = ms
        return self.known[key]


class Given:
    """Local batches by width, without times."""
    measured = False

    def __init__(self, local_batch):
        self.local_batch = local_batch
        self.widths = sorted(local_batch, reverse=True)
        self.domain = self.widths[0]
        self.micro_batches = local_batch[self.domain]
