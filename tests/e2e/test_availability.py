"""tools/availability: its reference numbers, what follows from measured step times, and what it refuses."""
import heapq
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import invar_job  # noqa: E402
from failures import model, regression, step_times  # noqa: E402

HEADER = "width,micro_batches,ms_per_step\n"
# 800 ms / T for each micro-batch.
STEPS = HEADER + "# exact\n" + "".join(f"{width},{m},{800 * m / width!r}\n" for width in (8, 7, 6, 4) for m in (2, 8))


class Availability(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, text):
        path = self.folder / "steps.csv"
        path.write_text(text)
        return str(path)

    def tool(self, *arguments):
        return subprocess.run([sys.executable, str(ROOT / "tools" / "availability"), *arguments], cwd=self.folder,
                              capture_output=True, text=True, timeout=invar_job.RUN_SECONDS)

    def table(self, stdout):
        """Rows of the throughput table: [failed %, domains hit %, throughputs ...]."""
        return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in stdout.splitlines()
                if re.match(r" *[\d.]+ % ", line)]

    def test_reference_numbers(self):
        """With fewer draws than --regression takes."""
        rng = random.Random(3)
        local_batch, rows = regression.PAUSED["NTP 7/6"]
        spares = {"NTP 7/6": (local_batch, {domains: rows[domains] for domains in (8, 16)})}
        results = [*regression.static(rng, 100), *regression.blast(rng, 100), *regression.traces(rng, 20),
                   *regression.paused(rng, 20, spares), *regression.intact(rng, 1)]
        self.assertEqual(len(results), 30 + 12 + 18 + 4 + 10)
        self.assertEqual([result for result in results if not regression.inside(result)], [])

    def test_the_bands_tell_policies_apart(self):
        rng = random.Random(3)
        drawn = [model.draw_failures(rng, regression.CLUSTER, 131) for _ in range(100)]
        for local_batch, packed in ((regression.NTP_65, True), (regression.NTP_76, False), (regression.DROP, True)):
            losses = [regression.loss_percent(failed, local_batch, packed) for failed in drawn]
            self.assertFalse(regression.inside(regression.judge("", losses, "1.58", 200)))

    def test_packing_leaves_the_worst_domains_over(self):
        cluster = model.Cluster(domains=10, domain_gpus=8, replica_domains=4)
        failed = {0: 5, 3: 1, 4: 2, 9: 1}
        widths = (8, 7, 6)
        self.assertEqual(+model.replica_widths(failed, cluster, widths), {7: 1, 8: 1})
        self.assertEqual({width: count for width, count in model.replica_widths(
            {0: 5, 3: 1, 4: 2}, model.Cluster(8, 8, 4), widths, packed=False).items() if count}, {0: 1, 6: 1})

    def test_batches_from_step_times(self):
        points = step_times.read_points(self.write(STEPS))
        self.assertEqual(step_times.Measured(points, 8).local_batch, {8: 8, 7: 7, 6: 6, 4: 4})
        self.assertEqual(step_times.Measured(points, 8, micro_batches=80).local_batch, {8: 80, 7: 70, 6: 60, 4: 40})
        wide = step_times.Measured(points, 32)
        self.assertEqual({width: wide.local_batch[width] for width in (32, 30, 28, 16)}, {32: 8, 30: 7, 28: 7, 16: 4})
        self.assertAlmostEqual(wide.ms(30, 5), 5 * 100 * 32 / 30)

    def test_kept_batch_is_the_greedy_one(self):
        slow_start = HEADER + "8,2,220\n8,8,820\n7,2,251\n7,5,590\n7,8,934\n4,2,430\n4,8,1620\n"
        workload = step_times.Measured(step_times.read_points(self.write(slow_start)), 8)
        rng = random.Random(1)
        for _ in range(50):
            replicas = {8: rng.randint(1, 9), 7: rng.randint(0, 4), 4: rng.randint(0, 3), 0: rng.randint(0, 2)}
            total = rng.randint(1, 150)
            nexts = [(workload.ms(width, 1), 1, width) for width in replicas for _ in range(replicas[width]) if width]
            heapq.heapify(nexts)
            for _ in range(total):
                ms, given, width = nexts[0]
                heapq.heapreplace(nexts, (workload.ms(width, given + 1), given + 1, width))
            self.assertEqual(workload.kept_batch_ms(replicas, total), ms)

    def test_one_gpu_of_eight_replicas(self):
        done = self.tool("--measured", self.write(STEPS), "--domain", "8", "--replica-domains", "1", "--gpus", "64",
                         "--fractions", str(1 / 64), "--spares", "1", "--draws", "3")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        # With the batch kept: dropping, 7 replicas share 64 micro-batches, so one takes 10; else a healthy one takes 9.
        self.assertEqual(self.table(done.stdout), [[1.56, 12.5, 87.5, 87.5, 98.44, 100, 80, 80, 88.89, 100]])
        svg = ElementTree.parse(self.folder / "availability.svg").getroot()
        self.assertEqual(len(svg.findall(".//{*}polyline")), 8)

    def test_given_local_batches(self):
        arguments = ("--local-batch", "32=8", "30=7", "28=6", "--gpus", "8192", "--draws", "20", "--spares", "0")
        done = self.tool(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = self.table(done.stdout)
        self.assertEqual(rows[0], [0, 0, 100, 100, 100, 100])
        for _, _, packed, unpacked, nonuniform, _ in rows[2:]:
            self.assertLess(unpacked, packed)
            self.assertLess(packed, nonuniform)
        self.assertEqual(self.tool(*arguments).stdout, done.stdout)

    def test_refuses_bad_input(self):
        for text, expected in (("", "the first line must be width,micro_batches,ms_per_step"),
                               ("8,1,2\n", "the first line must be"),
                               (HEADER + "8,1,x\n", "line 2: expected a width"),
                               (HEADER + "# \n\n8,1\n", "line 4: expected a width"),
                               (HEADER + "8,0,5\n", "line 2"), (HEADER + "8,1,nan\n", "line 2"),
                               (HEADER + "8,1,5\n8,2,6\n", "at least one narrower"),
                               (HEADER + "8,1,5\n8,2,6\n7,1,5\n", "width 7 needs step times of at least two"),
                               (HEADER + "8,1,5\n8,2,6\n7,1,7\n7,2,6\n", "at width 7, 2 micro-batches take 6 ms and 1")):
            with self.subTest(text=text):
                done = self.tool("--measured", self.write(text))
                self.assertEqual(done.returncode, 3)
                self.assertIn(expected, done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)
        steps = self.write(STEPS)
        for arguments, code, expected in ((("--measured", "absent.csv"), 3, "absent.csv"),
                                          (("--measured", steps, "--gpus", "60"), 3, "of 8 GPUs has 64"),
                                          (("--measured", steps, "--blast-radius", "16"), 3, "does not divide"),
                                          (("--local-batch", "8=7", "7=8"), 3, "takes no less"),
                                          (("--local-batch", "8"), 3, "expected WIDTH=BATCH"),
                                          (("--measured", steps, "--fractions", "2"), 2, "is not from 0 to 1"),
                                          (("--local-batch", "8=8", "--domain", "8"), 2, "belong to --measured"),
                                          ((), 2, "is required")):
            with self.subTest(arguments=arguments):
                done = self.tool(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(expected, done.stderr)
                self.assertNotIn("Traceback", done.stderr)


class MeasuredWidths(invar_job.JobTest):
    """tools/measure_widths times a model, and availability reads it."""

    def measure(self, *arguments):
        environment = {**invar_job.ENVIRONMENT, "INVAR": invar_job.INVAR, "MPIRUN": " ".join(invar_job.LAUNCH)}
        return subprocess.run([sys.executable, str(ROOT / "tools" / "measure_widths"), *map(str, arguments)], cwd=self.folder,
                              env=environment, capture_output=True, text=True, timeout=4 * invar_job.RUN_SECONDS)

    def rows(self):
        """Of steps.csv; how long a step took depends on what else the machine does."""
        lines = [line for line in (self.folder / "steps.csv").read_text().splitlines() if not line.startswith("#")]
        self.assertEqual(lines[0], ",".join(step_times.HEADER))
        rows = [line.split(",") for line in lines[1:]]
        self.assertTrue(all(float(ms) > 0 for _, _, ms in rows), rows)
        return [(int(width), int(micro_batches)) for width, micro_batches, _ in rows]

    def test_a_model_is_timed_at_each_width(self):
        config = self.config(train={"steps": 1, "sequence_length": 64})
        widths, micro_batches = [3, 2], [1, 16]
        done = self.measure(config, "--widths", *widths, "--micro-batches", *micro_batches, "--steps", 8, "-o", "steps.csv",
                            "--with", "train.micro_batch_size=2")
        self.assertEqual(done.returncode, 0, done.stderr)
        points = [(width, m) for width in widths for m in micro_batches]
        self.assertEqual(self.rows(), points)
        plausible = (f"{width},{m},{60 * m / width}" for width, m in points)
        (self.folder / "steps.csv").write_text("\n".join([",".join(step_times.HEADER), *plausible]))
        told = subprocess.run([sys.executable, str(ROOT / "tools" / "availability"), "--measured", "steps.csv", "--draws", "3"],
                              cwd=self.folder, capture_output=True, text=True, timeout=invar_job.RUN_SECONDS)
        self.assertEqual(told.returncode, 0, told.stderr)
        self.assertIn("Domains of 3 GPUs (measured widths)", told.stdout)

    def test_a_rank_of_each_width_is_timed_alone(self):
        config = self.config(train={"steps": 1, "sequence_length": 64})
        done = self.measure(config, "--widths", 4, 3, "--micro-batches", 1, 4, "--steps", 6, "--alone", "-o", "steps.csv")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.rows(), [(4, 1), (4, 4), (3, 1), (3, 4)])

    def test_what_cannot_be_timed(self):
        config = self.config()
        few = self.measure(config, "--widths", 2, 2, "--micro-batches", 1, 2)
        self.assertEqual(few.returncode, 2, few)
        self.assertIn("two or more widths", few.stderr)
        wrong = self.measure(config, "--widths", 2, 1, "--micro-batches", 1, 2, "--with", "model.hidden=3")
        self.assertEqual(wrong.returncode, 1, wrong)
        self.assertIn("width 2, 1 micro-batches: exit code", wrong.stderr)
        self.assertIn("model.hidden", wrong.stderr)


if __name__ == "__main__":
    unittest.main()
