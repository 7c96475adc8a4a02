"""Replicas of unequal tensor-parallel width, as a user meets them: which failures are planned for, what is refused, and runs
that go on with fewer ranks and come back, to the bit."""
import re
import unittest

from invar_job import INVAR, MODEL, JobTest, read_lines, series

USAGE = 2
DATA = 3
STOPPED = 75
GRID = ["parallel.tensor=4", "parallel.data=2"]

# All that a run may record, for replicas that differ in width or in shares of the batch.
RECORDS = {"hash_every": 1, "hash_blocks": "true", "dump_step": 2}


class Nonuniform(JobTest):
    def recipe(self, **sections):
        self.config(numerics={"precision": "fp32", "reduction": "invariant", "workers": 8}, optimizer={"lr": 1e-2},
                    train={"steps": 12, "global_batch_size": 8, "eval_every": 2, "eval_batches": 1}, log=RECORDS, **sections)

    def check_records(self, run, still, dump_step):
        """Dump, hashes of blocks, validation losses and exported weights are those of the run on one rank."""
        for record in (f"dump_step_{dump_step:08}.h5", "export"):
            self.succeed("compare", f"{run}/{record}", f"{still}/{record}", "--exact")
        blocks = f"hash_step_{dump_step:08}.h5"
        self.assertEqual((self.folder / run / blocks).read_bytes(), (self.folder / still / blocks).read_bytes())
        losses = series(self.folder / still, "validation_loss")
        self.assertGreater(len(losses), 0)
        self.assertEqual(series(self.folder / run, "validation_loss"), losses)

    def train(self, name, *overrides, ranks=None):
        return super().train(name, f"checkpoint.export_dir={name}/export", *overrides, ranks=ranks)

    def hashes(self, run):
        lines = read_lines(self.folder / run / "metrics.jsonl")
        return {line["step"]: line["state_hash"]["combined"] for line in lines if "state_hash" in line}

    def log(self, run):
        return (self.folder / run / "log.txt").read_text()

    def test_a_run_goes_on_with_fewer_ranks_and_comes_back(self):
        self.recipe(checkpoint={"every": 3})
        dump = 5  # at the second layout
        self.train("still", f"log.dump_step={dump}")
        parts = [(GRID, 8), ([*GRID, "parallel.nonuniform.failed=[dp0.tp2]", "parallel.sequence=true"], 7),
                 ([*GRID, "parallel.nonuniform.failed=[dp0.tp0, dp1.tp3, dp1.tp1]", "parallel.sequence=true"], 5),
                 (GRID, 8)]
        for i, (layout, ranks) in enumerate(parts):
            stop = [] if i + 1 == len(parts) else ["train.exit_after_steps=3"]
            outcome = self.run_invar("train", "run.yaml", "log.dir=moving", f"log.dump_step={dump}",
                                     "checkpoint.export_dir=moving/export", *stop, *layout, ranks=ranks)
            self.assertEqual(outcome.errors, [], outcome)
            self.assertEqual(len(self.hashes("moving")), 3 * (i + 1), outcome)
        self.assertEqual(self.hashes("moving"), self.hashes("still"))
        self.check_records("moving", "still", dump)
        losses = set()
        for layout, ranks in (([], None), (["parallel.tensor=4", "parallel.nonuniform.tensor_widths=[4, 3]"], 7),
                              (["parallel.tensor=2", "parallel.spare=1"], 5)):
            losses.add(self.succeed("eval", "moving/checkpoints", *layout, ranks=ranks).stdout.splitlines()[-1])
        self.assertEqual(len(losses), 1, losses)
        self.assertIn("7 ranks: tensor 3, 4 with sequence parallelism x data 2", self.log("moving"))
        self.assertIn("5 ranks: tensor 3, 2 with sequence parallelism x data 2", self.log("moving"))

    def test_launched_ranks_that_failed_idle_and_spares_step_in(self):
        self.recipe()
        steps = ["train.steps=3"]
        self.train("still", *steps)
        for run, layout, ranks, described in (
                ("idle", ["parallel.nonuniform.failed=[dp1.tp0]"], 8, "7 ranks: tensor 4, 3 x data 2"),
                ("spare", ["parallel.nonuniform.failed=[dp1.tp0]", "parallel.spare=1"], 9, "8 ranks: tensor 4 x data 2"),
                ("survivors", ["parallel.nonuniform.failed=[dp1.tp0]", "parallel.spare=1"], 8, "8 ranks: tensor 4 x data 2"),
                ("reserve", ["parallel.spare=1"], 9, "8 ranks: tensor 4 x data 2")):
            with self.subTest(run):
                self.train(run, *steps, *GRID, *layout, ranks=ranks)
                self.assertEqual(self.hashes(run), self.hashes("still"))
                self.check_records(run, "still", 2)
                self.assertIn(described, self.log(run))

    def test_a_replica_without_ranks_is_left_out_and_says_so(self):
        self.recipe()
        self.train("still", "train.steps=2")
        failed = "parallel.nonuniform.failed=[dp0.tp0, dp0.tp1, dp0.tp2, dp0.tp3]"
        self.train("rest", "train.steps=2", *GRID, failed, ranks=8)
        self.assertEqual(self.hashes("rest"), self.hashes("still"))
        self.assertRegex(self.log("rest"), r"left out: replica 0 of 2")
        self.assertIn("4 ranks: tensor 4 x data 1", self.log("rest"))

    def test_a_batch_of_one_share_for_each_replica(self):
        self.recipe()
        arguments = ["train.steps=2", "train.global_batch_size=auto", "numerics.workers=2", "parallel.tensor=2", "parallel.data=2"]
        self.train("still", *arguments, ranks=4)
        for slot in ("dp0.tp1", "dp1.tp0"):
            self.train(slot, *arguments, f"parallel.nonuniform.failed=[{slot}]", ranks=3)
            self.assertEqual(self.hashes(slot), self.hashes("still"))
            self.check_records(slot, "still", 2)

    def test_a_run_measures_the_speeds_of_unequal_replicas_and_a_plan_takes_them(self):
        self.config(train={"steps": 6, "global_batch_size": 32})
        layout = ["parallel.tensor=2", "parallel.nonuniform.tensor_widths=[2, 1]"]
        outcome = self.succeed("train", "run.yaml", "log.dir=unequal", *layout, ranks=3)
        lines = read_lines(self.folder / "unequal" / "metrics.jsonl")
        self.assertEqual(len(lines), 6)
        for line in lines:
            self.assertEqual(len(line["replica_seconds"]), 2, line)
            # Not of step_ms, which is by the clock of rank 0: another rank may begin a step earlier.
            self.assertTrue(all(0 < seconds < outcome.seconds for seconds in line["replica_seconds"]), line)
        told = re.findall(r"measured speeds: (parallel\.nonuniform\.speeds=\[(.*), (.*)\]) shares the batch "
                          r"(?:as it is, )?(\d+), (\d+) ", self.log("unequal"))
        self.assertEqual(len(told), 1, self.log("unequal"))
        override, *speeds, first, second = told[0]
        self.assertEqual(max(map(float, speeds)), 1)
        self.assertEqual(int(first) + int(second), 32)
        planned = self.succeed("plan", "run.yaml", "--world", 3, *layout, override).stdout
        self.assertRegex(planned, rf"micro-steps +{first}, {second} of 1 ")

        self.train("equal", "parallel.data=2", ranks=2)
        self.assertEqual(set(read_lines(self.folder / "equal" / "metrics.jsonl")[0]), set(lines[0]) - {"replica_seconds"})
        self.assertNotIn("speeds=", self.log("equal"))

    # One micro-batch for a rank alone, 31 for two: far off at any speed. The fourth rank is idle.
    UNFAIR = ["parallel.tensor=2", "parallel.data=2", "parallel.nonuniform.failed=[dp1.tp1]",
              "parallel.nonuniform.speeds=[31, 1]"]

    DUMPED = 10  # after the shares have changed

    def unfair_recipe(self):
        self.config(numerics={"precision": "fp32", "reduction": "invariant", "workers": 32}, optimizer={"lr": 1e-2},
                    train={"steps": 14, "global_batch_size": 32, "eval_every": 8, "eval_batches": 1},
                    log={**RECORDS, "dump_step": self.DUMPED}, checkpoint={"every": 4})

    def shares(self, run):
        found = re.findall(r"batch: 32 sequences .* (\d+), (\d+) micro-steps of 1", self.log(run))
        return [(int(first), int(second)) for first, second in found]

    def steps(self, run):
        return [line["step"] for line in read_lines(self.folder / run / "metrics.jsonl") if "loss" in line]

    def test_a_run_shares_the_batch_anew_by_what_it_measured(self):
        self.unfair_recipe()
        self.train("still")
        for run, asynchronous in (("async", "true"), ("sync", "false")):
            self.train(run, *self.UNFAIR, "parallel.nonuniform.reshare=true", f"checkpoint.async={asynchronous}", ranks=4)
            before, after = self.shares(run)
            self.assertEqual(before, (31, 1))
            self.assertLess(after[0], 31)
            self.assertEqual(sum(after), 32)
            told = re.findall(r"step 8: from now on (parallel\.nonuniform\.speeds=\[.*\]) shares the batch (\d+), (\d+) "
                              r"instead of 31, 1 samples", self.log(run))
            self.assertEqual([(int(first), int(second)) for _, first, second in told], [after], self.log(run))
            self.assertEqual(len(re.findall(r"resumed from .*step_00000008: step 8 of 14, 256 samples", self.log(run))), 1)
            self.assertEqual(self.steps(run), list(range(1, 15)))
            self.assertEqual(self.hashes(run), self.hashes("still"))
            self.check_records(run, "still", self.DUMPED)
            resolved = (self.folder / run / "config.yaml").read_text()
            self.assertIn(told[0][0].split("=")[1], resolved)

        self.train("told", *self.UNFAIR, ranks=4)
        self.assertEqual(self.shares("told"), [(31, 1)])
        self.assertNotIn("from now on", self.log("told"))
        self.assertIn("step 8: parallel.nonuniform.speeds=[", self.log("told"))
        self.assertEqual(self.hashes("told"), self.hashes("still"))
        self.check_records("told", "still", self.DUMPED)

    def test_other_shares_change_neither_when_a_run_stops_nor_how_it_goes_on(self):
        self.unfair_recipe()
        self.train("still")
        arguments = ["train", "run.yaml", "log.dir=run", *self.UNFAIR, "parallel.nonuniform.reshare=true"]
        stopped = self.run_invar(*arguments, "checkpoint.resume=never", "train.exit_after_steps=10", ranks=4)
        self.assertEqual(stopped.code, STOPPED, stopped)
        self.assertEqual(self.steps("run"), list(range(1, 11)), stopped)
        self.assertEqual(len(self.shares("run")), 2, stopped)
        ended = self.run_invar(*arguments, ranks=4)
        self.assertEqual(ended.code, 0, ended)
        self.assertEqual(self.shares("run")[2:], [(31, 1)])  # of the config, until it has measured
        self.assertEqual(self.steps("run"), list(range(1, 15)))
        self.assertEqual(self.hashes("run"), self.hashes("still"))
        # Where the shares are to change, but the step is the last or no checkpoint is due, nothing does.
        for run, changes in (("last", ["train.steps=8", "log.dump_step=8"]), ("between", ["checkpoint.every=20"])):
            self.train(run, *self.UNFAIR, "parallel.nonuniform.reshare=true", *changes, ranks=4)
            self.assertEqual(self.shares(run), [(31, 1)])

    def test_equal_replicas_share_anew_too(self):
        """What speeds they are given is far off, and then may be as it is without a failure."""
        self.unfair_recipe()
        self.train("still")
        self.train("run", "parallel.tensor=1", "parallel.nonuniform.tensor_widths=[1, 1]",
                   "parallel.nonuniform.speeds=[31, 1]", "parallel.nonuniform.reshare=true", ranks=2)
        self.assertEqual(len(re.findall("step 8: from now on", self.log("run"))), 1)
        self.assertEqual(self.hashes("run"), self.hashes("still"))
        for line in read_lines(self.folder / "run" / "metrics.jsonl"):
            self.assertTrue("replica_seconds" in line or "validation_loss" in line, line)
        self.train("whole", "parallel.tensor=1", "parallel.nonuniform.tensor_widths=[1, 1]",
                   "parallel.nonuniform.reshare=true", ranks=2)
        self.assertIn("replica_seconds", read_lines(self.folder / "whole" / "metrics.jsonl")[0])
        self.assertEqual(self.hashes("whole"), self.hashes("still"))

    def test_idle_ranks_end_with_a_job_that_cannot_start(self):
        self.unfair_recipe()
        for override in ("checkpoint.resume=nowhere", "data.kind=tokens data.path=nowhere.bin data.validation_fraction=0.5"):
            self.fail_with(DATA, "nowhere", arguments=["train", "run.yaml", "log.dir=run", *self.UNFAIR, *override.split()],
                           ranks=4, hint=False)
        self.config(train={"steps": 1}, checkpoint={"every": 1})
        self.train("run")
        self.fail_with(DATA, "nowhere", ranks=4, hint=False,
                       arguments=["eval", "run", "data.kind=tokens", "data.path=nowhere.bin", "data.validation_fraction=0.5",
                                  "train.global_batch_size=4", *self.UNFAIR[:3]])

    def test_a_batch_that_shrinks_does_so_by_the_measured_speeds(self):
        self.config(train={"steps": 24, "global_batch_size": 64, "sequence_length": 64}, checkpoint={"every": 4})
        self.train("run", *self.UNFAIR, "parallel.nonuniform.batch=shrink", "parallel.nonuniform.reshare=true",
                   "log.hash_every=3", "log.dump_step=23", "train.eval_every=5", "train.eval_batches=1", ranks=4)
        told = re.findall(r"step (\d+): from now on .* shares the batch (\d+), (\d+) instead of 32, 1 samples", self.log("run"))
        self.assertEqual(len(told), 1, self.log("run"))
        step, *shares = map(int, told[0])
        self.assertEqual([int(batch) for batch in re.findall(r"batch: (\d+) sequences", self.log("run"))], [33, sum(shares)])
        self.assertIn(f"step {step} of 24, {33 * step} samples consumed", self.log("run"))
        self.assertEqual(self.steps("run"), list(range(1, 25)))
        self.assertEqual(len(self.hashes("run")), 8)
        self.succeed("compare", "run/dump_step_00000023.h5", "run/dump_step_00000023.h5")

    def test_replicas_that_lost_as_many_ranks_are_of_one_width(self):
        self.config(model={**MODEL, "num_hidden_layers": 4, "num_key_value_heads": 2}, numerics={"precision": "fp32"},
                    train={"steps": 3, "global_batch_size": 6})
        self.train("whole", "log.dump_step=1")
        self.train("damaged", "log.dump_step=1", "parallel.tensor=4", "parallel.data=3",
                   "parallel.nonuniform.failed=[dp0.tp0, dp1.tp3, dp2.tp1]", ranks=9)
        self.succeed("compare", "damaged/dump_step_00000001.h5", "whole/dump_step_00000001.h5", "--rtol", "1e-4")
        self.assertIn("9 ranks: tensor 3 x data 3", self.log("damaged"))
        whole, damaged = (read_lines(self.folder / run / "metrics.jsonl") for run in ("whole", "damaged"))
        self.assertEqual(len(damaged), 3)
        for one, other in zip(whole, damaged):
            self.assertAlmostEqual(one["loss"], other["loss"], delta=1e-4)
            self.assertNotIn("replica_seconds", other)

    def test_faults_are_refused(self):
        self.recipe()
        train = ["train", "run.yaml", "log.dir=refused"]
        for arguments, ranks, texts in (
                ([*GRID, "parallel.nonuniform.failed=[dp7.tp0]"], 8, ["dp7.tp0"]),
                ([*GRID, "parallel.nonuniform.failed=[node77.gpu0]"], 8, ["node77.gpu0"]),
                ([*GRID, "parallel.nonuniform.failed=[dp0.tp0]"], 6, ["8 ranks", "6"]),
                (["parallel.tensor=9", "parallel.nonuniform.tensor_widths=[9, 4]"], 13, ["9"]),
                (["parallel.tensor=2", "parallel.nonuniform.tensor_widths=[3, 2]"], 5, ["tensor_widths", "parallel.tensor"]),
                (["parallel.tensor=2", "parallel.nonuniform.tensor_widths=[2, 1]", "parallel.nonuniform.reshare=true"],
                 3, ["parallel.nonuniform.reshare", "checkpoint.every"]),
                ([*GRID, "parallel.nonuniform.failed=[" + ", ".join(f"dp{d}.tp{t}" for d in (0, 1) for t in range(4)) + "]"],
                 8, ["parallel.nonuniform.failed"])):
            with self.subTest(arguments[-1]):
                self.fail_with(USAGE, *texts, arguments=[*train, *arguments], ranks=ranks)
                self.assertFalse((self.folder / "refused").exists())

    def test_ranks_with_other_plans_are_told_before_they_wait_for_each_other(self):
        self.recipe()
        train = ["train", "run.yaml", "log.dir=refused", "parallel.tensor=2"]
        one = "parallel.nonuniform.tensor_widths=[2, 1]"
        differs = "plans other replicas than rank 0"
        for other, text in (("parallel.nonuniform.tensor_widths=[1, 2]", differs),
                            ("parallel.nonuniform.tensor_widths=[1, 1, 1]", differs),
                            ("parallel.spare=1", differs),
                            ("parallel.nonuniform.tensor_widths=[2, 2]", "4 ranks, but the job has 3")):
            for first, last in ((one, other), (other, one)):
                with self.subTest(f"{first} with {last}"):
                    last_rank = [":", "-n", 1, INVAR, *train, last]
                    self.fail_with(USAGE, text, arguments=[*train, first, *last_rank], ranks=2)
                    self.assertFalse((self.folder / "refused").exists())


if __name__ == "__main__":
    unittest.main()
