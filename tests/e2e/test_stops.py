"""Runs that are told to stop, and runs that cannot save: what is left always leads on to the undisturbed run's end."""
import os
import resource
import shutil
import signal
import time
import unittest

import test_checkpoints
from invar_job import RUN_SECONDS, ids_of, last_by_step, series
from test_checkpoints import TENSOR, USAGE, FAULT

RESTART = 75


class StopTest(test_checkpoints.CheckpointTest):
    def resume_and_compare(self, run, reference, ranks=None):
        outcome = self.succeed("train", "run.yaml", f"log.dir={run}", ranks=ranks)
        self.assertIn("resumed from", outcome.stdout)
        self.check_same_run(run, reference)

    def check_stopped(self, outcome, run, reason):
        """Code 75, no error, and a checkpoint of the very step at which it stopped."""
        self.assertEqual(outcome.code, RESTART, outcome)
        self.assertEqual(outcome.errors, [], outcome)
        last = max(last_by_step(self.folder / run, "loss"))
        self.assertLess(last, self.STEPS)
        self.assertEqual(outcome.stdout.count(f"stopping after step {last}: {reason}"), 1, outcome)
        self.assertEqual(outcome.stdout.count(f"saved step {last}:"), 1, outcome)
        self.assertEqual(self.latest(run), f"step_{last:08}")
        self.inspect(run, "--verify")
        return last


class ExitAfter(StopTest):
    def test_steps(self):
        self.recipe()
        self.train("whole")
        for times in range(3):
            outcome = self.run_invar("train", "run.yaml", "log.dir=parts", "train.exit_after_steps=6")
            self.assertEqual(self.check_stopped(outcome, "parts", "train.exit_after_steps = 6"), 6 * times + 6)
        self.resume_and_compare("parts", "whole")
        self.assertEqual(series(self.folder / "parts", "lr"), series(self.folder / "whole", "lr"))  # no step twice
        self.assertGreater(len(set(series(self.folder / "whole", "lr"))), 15)

    def test_steps_on_ranks(self):
        self.recipe(parallel=TENSOR)
        self.train("whole", ranks=4)
        outcome = self.run_invar("train", "run.yaml", "log.dir=parts", "train.exit_after_steps=13", ranks=4)
        self.assertEqual(self.check_stopped(outcome, "parts", "train.exit_after_steps = 13"), 13)
        self.resume_and_compare("parts", "whole", ranks=4)

    def test_the_last_step_is_an_end(self):
        self.recipe()
        self.train("run", "train.exit_after_steps=20")
        self.assertEqual(self.latest("run"), "step_00000020")

    def test_minutes(self):
        self.recipe(parallel=TENSOR)
        self.train("whole", ranks=2)
        outcome = self.run_invar("train", "run.yaml", "log.dir=parts", "train.exit_after_minutes=1e-6", ranks=2)
        self.assertEqual(self.check_stopped(outcome, "parts", "train.exit_after_minutes = 1e-06"), 1)
        outcome = self.run_invar("train", "run.yaml", "log.dir=parts", "train.exit_after_minutes=0.01",  # in evaluation
                                 "train.eval_every=2", "train.eval_batches=1000000", ranks=2)
        self.assertEqual(self.check_stopped(outcome, "parts", "train.exit_after_minutes = 0.01"), 2)
        self.assertEqual(series(self.folder / "parts", "validation_loss"), [])
        self.resume_and_compare("parts", "whole", ranks=2)

    def test_needs_a_folder(self):
        for key in ("train.exit_after_steps=3", "train.exit_after_minutes=1"):
            self.fail_with(USAGE, key.split("=")[0], "checkpoint.dir", arguments=["train", self.config(), key])


class Signals(StopTest):
    """Signals that come while the run stands still at a moment that the test has made."""

    def signalled(self, run, number, receivers, pause, ranks=None, overrides=()):
        """Sends the signal to receivers(process)."""
        process = self.start("train", "run.yaml", f"log.dir={run}", *overrides, ranks=ranks, pauses=[pause])
        self.reach(pause, process)
        pids, told = ids_of(process), receivers(process)
        if ranks and process.pid in told:
            self.announce(pause, lambda: process.send_signal(number))
        else:
            for pid in told:
                os.kill(pid, number)
            pause.release()
        outcome = self.finish(process, time.monotonic(), RUN_SECONDS)
        self.check_gone(pids)
        return outcome

    def test_while_training(self):
        self.recipe(parallel=TENSOR)
        self.train("whole", ranks=4)
        cases = {
            "launcher": (signal.SIGUSR1, lambda process: [process.pid], "signal USR1"),  # which forwards it to all
            "one_rank": (signal.SIGUSR1, lambda process: ids_of(process)[3:], "signal USR1"),
            "every_rank": (signal.SIGTERM, ids_of, "signal TERM"),
        }
        for run, (number, receivers, reason) in cases.items():
            with self.subTest(run):
                outcome = self.signalled(run, number, receivers, self.pause_at_step(run, 3), ranks=4)
                # The ranks that do not stand still may have told each other that they have no signal.
                self.assertIn(self.check_stopped(outcome, run, reason), [3, 4] if run == "one_rank" else [3])
                self.resume_and_compare(run, "whole", ranks=4)

    def test_one_process(self):
        self.recipe()
        self.train("whole")
        for number in (signal.SIGTERM, signal.SIGUSR2):
            run = number.name
            outcome = self.signalled(run, number, ids_of, self.pause_at_step(run, 2))
            self.assertEqual(self.check_stopped(outcome, run, f"signal {run[3:]}"), 2)
            self.resume_and_compare(run, "whole")

    def test_during_an_evaluation(self):
        self.recipe(parallel=TENSOR)
        self.train("whole", ranks=2)
        process = self.stalled("run", 7, ranks=2)
        process.send_signal(signal.SIGUSR1)
        outcome = self.finish(process, time.monotonic(), RUN_SECONDS)
        self.assertEqual(self.check_stopped(outcome, "run", "signal USR1"), 7)
        self.assertEqual(series(self.folder / "run", "validation_loss"), [])  # none of a part of the data
        self.resume_and_compare("run", "whole", ranks=2)

    def test_during_a_save(self):
        """A rank writes its shard, or all shards are written."""
        self.recipe(parallel=TENSOR, checkpoint={"every": 2})
        self.train("whole", ranks=2)
        shard, rename = ("write", "*/step_00000002.tmp/shard_00001.h5*"), ("rename", "*/step_00000002.tmp")
        for run, moment, number in (("async", shard, signal.SIGUSR1), ("async_rename", rename, signal.SIGTERM),
                                    ("sync", shard, signal.SIGTERM)):
            with self.subTest(run):
                folder = self.folder / run / "checkpoints"
                outcome = self.signalled(run, number, ids_of, self.pause(*moment), 2,
                                         [f"checkpoint.async={str(run != 'sync').lower()}"])
                last = self.check_stopped(outcome, run, f"signal {number.name[3:]}")
                self.assertLessEqual(last, 5)  # the save of step 4 waits for that of step 2
                self.assertEqual(outcome.stdout.count("saved step 2:"), 1, outcome)
                self.assertEqual(list(folder.glob("*.tmp")), [])
                self.resume_and_compare(run, "whole", ranks=2)

    def test_without_checkpoints_a_signal_ends_the_run(self):
        self.recipe(checkpoint={"every": 0})
        outcome = self.signalled("run", signal.SIGTERM, ids_of, self.pause_at_step("run", 2))
        self.assertEqual(outcome.code, -signal.SIGTERM, outcome)


class CannotSave(StopTest):
    """A disk that is full for large files, which the limit on file sizes gives to every user and on every disk."""

    def setUp(self):
        super().setUp()
        self.recipe(model={"vocab_size": 2000}, checkpoint={"every": 3, "keep": 1})
        self.train("whole")
        outcome = self.run_invar("train", "run.yaml", "log.dir=run", "train.exit_after_steps=3")
        self.assertEqual(outcome.code, RESTART, outcome)
        self.before = self.contents()

    def contents(self):
        checkpoints = self.folder / "run" / "checkpoints"
        return {path.relative_to(checkpoints): path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}

    @staticmethod
    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def limited(self, *overrides):
        return self.run_invar("train", "run.yaml", "log.dir=run", *overrides, in_child=self.small_files)

    def test_training_goes_on(self):
        for mode in ("true", "false"):
            with self.subTest(asynchronous=mode):
                outcome = self.limited(f"checkpoint.async={mode}")
                self.check_failure(outcome, FAULT, "the last checkpoint, of step 20, could not be written",
                                   "the run can go on from step 3")
                for step in (6, 9, 12, 15, 18, 20):
                    warning = f"warning: the checkpoint of step {step} could not be written: "
                    self.assertEqual((outcome.stdout + outcome.stderr).count(warning), 1, outcome)
                self.assertIn("shard_00000.h5", outcome.stdout + outcome.stderr)
                self.assertIn("File too large", outcome.stdout + outcome.stderr)
                self.assertNotIn("HDF5-DIAG", outcome.stderr)
                self.assertEqual(last_by_step(self.folder / "run", "loss"),
                                 last_by_step(self.folder / "whole", "loss"))
                self.assertEqual(self.contents(), self.before)  # the earlier checkpoint and `latest` alone
        self.inspect("run", "--verify")
        self.resume_and_compare("run", "whole")

    def test_training_stops(self):
        outcome = self.limited("checkpoint.on_error=stop")
        self.check_failure(outcome, FAULT, "the checkpoint of step 6 could not be written", "File too large",
                           "checkpoint.on_error: continue")
        self.assertLess(max(last_by_step(self.folder / "run", "loss")), 10)
        self.assertEqual(self.contents(), self.before)
        self.resume_and_compare("run", "whole")

    def test_folder_that_goes_away(self):
        """In the middle of a run, between two saves: a later save makes it anew."""
        self.recipe(parallel=TENSOR, checkpoint={"every": 3})
        pause = self.pause("write", "*/moved/log.txt", "saved step 3:")
        process = self.start("train", "run.yaml", "log.dir=moved", ranks=2, pauses=[pause])
        self.reach(pause, process)
        (self.folder / "moved" / "checkpoints").rename(self.folder / "elsewhere")
        pause.release()
        outcome = self.finish(process, time.monotonic(), RUN_SECONDS)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(self.latest("moved"), "step_00000020")
        self.inspect("moved", "--verify")
        self.inspect("elsewhere", "--verify")

    def test_folder_that_cannot_be(self):
        shutil.rmtree(self.folder / "run" / "checkpoints")
        self.write("run/checkpoints", "a file in the way")
        outcome = self.run_invar("train", "run.yaml", "log.dir=run", "checkpoint.on_error=stop")
        self.check_failure(outcome, USAGE, "run/checkpoints")
        self.assertNotIn("step 10/20", outcome.stdout)


if __name__ == "__main__":
    unittest.main()
