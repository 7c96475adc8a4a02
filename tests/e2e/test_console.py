"""What a run and the other commands do when their console, disk or folder cannot be written, and who may write where."""
import os
import re
import resource
import signal
import subprocess
import time
import unittest
import unittest.mock

import invar_job
from invar_job import FAILURE_SECONDS, ROOT, RUN_SECONDS, JobTest, read_lines, series

FAULT, USAGE, RESTART = 1, 2, 75
FULL = "/dev/full"


class Console(JobTest):
    def start_into(self, stdout, *arguments, ranks=None):
        process = subprocess.Popen(invar_job.command(arguments, ranks), cwd=self.folder, env=invar_job.ENVIRONMENT,
                                   text=True, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE)
        self.addCleanup(lambda: invar_job.end(process) if process.poll() is None else None)
        return process

    def run_into(self, stdout, *arguments, ranks=None):
        since = time.monotonic()
        return self.finish(self.start_into(stdout, *arguments, ranks=ranks), since, RUN_SECONDS)

    def closed_pipe(self):
        reader, writer = os.pipe()
        os.close(reader)
        self.addCleanup(os.close, writer)
        return writer

    def test_a_run_goes_on_without_its_reader(self):
        config = self.config(log={"dir": "run", "every": 1}, checkpoint={"every": 3})
        self.check_whole(self.run_into(self.closed_pipe(), "train", config))
        log = (self.folder / "run/log.txt").read_text()
        self.assertEqual(log.count("standard output: cannot be written: Broken pipe"), 1)

    def test_a_job_of_launch_mpirun_goes_on_without_its_reader(self):
        """mpirun itself ends its ranks when its standard output is closed; the script reads on for it."""
        config = self.config(log={"dir": "run", "every": 1}, checkpoint={"every": 3}, train={"steps": 200})
        since = time.monotonic()
        environment = {**invar_job.ENVIRONMENT, "INVAR": invar_job.INVAR}
        process = subprocess.Popen([ROOT / "launch/mpirun", "-n", "2", config], cwd=self.folder, env=environment, text=True,
                                   stdin=subprocess.DEVNULL, stdout=self.closed_pipe(), stderr=subprocess.PIPE)
        self.addCleanup(lambda: invar_job.end(process) if process.poll() is None else None)
        self.check_whole(self.finish(process, since, RUN_SECONDS), steps=200)

    def check_whole(self, outcome, steps=6):
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(series(self.folder / "run", "step"), list(range(1, steps + 1)))
        self.assertTrue((self.folder / f"run/checkpoints/step_{steps:08}/index.h5").exists())
        self.assertIn(f"step {steps}/{steps} | loss", (self.folder / "run/log.txt").read_text())

    def test_a_run_goes_on_with_a_full_disk_under_its_console(self):
        config = self.config(log={"dir": "run", "every": 1})
        with open(FULL, "w") as full:
            outcome = self.run_into(full, "train", config)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(series(self.folder / "run", "step"), [1, 2, 3, 4, 5, 6])
        log = (self.folder / "run/log.txt").read_text()
        self.assertEqual(log.count("standard output: cannot be written: No space left on device"), 1)

    def test_commands_that_print_fail_on_a_full_disk(self):
        self.train("run", "checkpoint.every=6", config=self.config())
        commands = (["keys"], ["--version"], ["--help"], ["train", "--help"], ["plan", "run.yaml", "--world", "2"],
                    ["inspect", "run"], ["inspect", "run", "--verify"], ["eval", "run", "data.kind=mock"],
                    ["compare", "run", "run"], ["export", "run", "hf"], ["selftest", "device=cpu", "--steps", "1"],
                    ["parity", invar_job.REFERENCE / "qwen3"])
        for arguments in commands:
            with self.subTest(arguments=arguments), open(FULL, "w") as full:
                outcome = self.run_into(full, *arguments)
                self.check_failure(outcome, FAULT, "standard output: cannot be written: No space left on device",
                                   "free some space")

    def test_commands_that_print_end_quietly_without_their_reader(self):
        for arguments in (["keys"], ["--help"], ["plan", self.config(), "--world", "2"]):
            outcome = self.run_into(self.closed_pipe(), *arguments)
            self.assertIn(outcome.code, (0, -signal.SIGPIPE), outcome)
            self.assertEqual(outcome.stderr, "")

    def test_an_export_goes_on_without_its_reader(self):
        self.train("run", "checkpoint.every=6", config=self.config())
        outcome = self.run_into(self.closed_pipe(), "export", "run", "hf")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertTrue((self.folder / "hf/config.json").exists())


class LogFolder(JobTest):
    def test_one_run_at_a_time(self):
        """The first one holds the folder until it ends; a second one is refused and leaves no trace."""
        config = self.config(train={"steps": 10**9}, log={"dir": "run", "every": 1})
        first = self.start("train", config)
        metrics = self.folder / "run/metrics.jsonl"
        self.assertTrue(invar_job.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, RUN_SECONDS))
        outcome = self.run_invar("train", config, "train.steps=1", seconds=FAILURE_SECONDS + 15)
        self.check_failure(outcome, USAGE, "log.dir: run: another run writes its log and metrics here", "end the other")
        self.assertIsNone(first.poll())
        self.assertEqual((self.folder / "run/log.txt").read_text().count("training data:"), 1)
        first.kill()
        first.wait()
        self.succeed("train", config, "train.steps=1")

    def test_a_fresh_start_keeps_what_earlier_ones_wrote(self):
        config = self.config()
        kept = ["config.yaml", "metrics.jsonl", "state_hashes.jsonl", "dump_step_00000001.h5", "hash_step_00000001.h5"]
        outputs = ("log.hash_every=1", "log.hash_blocks=true", "log.dump_step=1", "train.steps=1")
        for seed in (1, 2, 3):
            outcome = self.succeed("train", config, "log.dir=run", f"train.seed={seed}", *outputs)
            self.assertEqual("an earlier run in run is kept as" in outcome.stdout, seed > 1, outcome)
        run = self.folder / "run"
        names = {name for name in os.listdir(run) if name not in ("log.txt", "lock")}
        numbered = {name.replace(".", f".{number}.", 1) for name in kept for number in (1, 2)}
        self.assertEqual(names, {*kept, *numbered})
        for name, seed in (("config.1.yaml", 1), ("config.2.yaml", 2), ("config.yaml", 3)):
            self.assertIn(f"  seed: {seed}\n", (run / name).read_text())
        losses = [read_lines(run / name)[0]["loss"] for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")]
        self.assertEqual(len(set(losses)), 3)

    def test_a_resumed_run_appends(self):
        config = self.config(log={"dir": "run", "every": 1}, checkpoint={"every": 2})
        self.assertEqual(self.run_invar("train", config, "train.exit_after_steps=2").code, RESTART)
        outcome = self.succeed("train", config)
        self.assertNotIn("an earlier run", outcome.stdout)
        self.assertEqual(series(self.folder / "run", "step"), [1, 2, 3, 4, 5, 6])

    def test_a_folder_that_cannot_be_used_is_a_config_error(self):
        self.write("file", "in the way")
        for key in ("log.dir", "checkpoint.dir"):
            for path in ("file", "file/run"):
                with self.subTest(key=key, path=path):
                    self.fail_with(USAGE, f"{key}: {path}", "Not a directory", "name a folder",
                                   arguments=["train", self.config(), f"{key}={path}"])


class FullDisk(JobTest):
    """The limit on the size of files stands for a full disk; the system's reason is in every message."""

    REASON = "File too large"

    def run_limited(self, limit, *arguments):
        def in_child():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return self.run_invar(*arguments, in_child=in_child)

    def test_log_and_metrics(self):
        """They end nothing; whole lines stay."""
        config = self.config(log={"dir": "run", "every": 1}, train={"steps": 400})
        outcome = self.run_limited(8000, "train", config)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertNotIn("LOG ERROR", outcome.stdout + outcome.stderr)
        for name in ("log.txt", "metrics.jsonl"):
            self.assertEqual(outcome.stdout.count(f"run/{name}: cannot be written: {self.REASON}"), 1, outcome)
            self.assertTrue((self.folder / "run" / name).read_text().endswith("\n"))
        self.assertIn("step 400/400 | loss", outcome.stdout)

    def test_dump(self):
        outcome = self.run_limited(20000, "train", self.config(log={"dir": "run", "dump_step": 1}))
        self.check_failure(outcome, FAULT, "dump_step_00000001.h5", self.REASON, "ulimit -f")

    def test_block_hashes(self):
        config = self.config(log={"dir": "run", "hash_every": 1, "hash_blocks": "true"}, train={"steps": 1})
        outcome = self.run_limited(9000, "train", config)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertRegex(outcome.stdout, rf"hash_step_00000001.h5: .*{self.REASON}.*training goes on")

    def test_last_checkpoint(self):
        outcome = self.run_limited(100000, "train", self.config(log={"dir": "run"}, checkpoint={"every": 10**6}))
        self.check_failure(outcome, FAULT, "the last checkpoint, of step 6, could not be written: run/checkpoints/",
                           self.REASON)

    def test_export(self):
        config = self.config(checkpoint={"export_dir": "hf"})
        outcome = self.run_limited(50000, "train", config)
        self.check_failure(outcome, FAULT, "hf/model.safetensors", self.REASON, "ulimit -f")


class Threads(JobTest):
    def test_more_than_the_host_has_cores_for_are_told_with_the_number_to_set(self):
        cores = len(os.sched_getaffinity(0))
        with unittest.mock.patch.dict(invar_job.ENVIRONMENT, OMP_NUM_THREADS=str(cores + 1)):
            outcome = self.succeed("train", self.config(train={"steps": 1}), ranks=2)
        warning = re.search(rf"warning: 2 ranks of {cores + 1} threads share (\d+) cores .*", outcome.stdout)
        self.assertIsNotNone(warning, outcome)
        usable = int(warning[1])  # fewer than this process may use, if its group has a quota
        self.assertLessEqual(usable, cores)
        self.assertIn(f": set OMP_NUM_THREADS={usable // 2}" if usable > 1 else ": start at most 1 ranks", warning[0])


class EarlySignals(JobTest):
    def with_pending(self, number):
        def in_child():
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
            os.kill(os.getpid(), number)
        return in_child

    def test_a_signal_before_anything_else_stops_the_run_with_a_checkpoint(self):
        config = self.config(train={"steps": 10**9}, log={"dir": "run"}, checkpoint={"every": 10**8})
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            outcome = self.run_invar("train", config, in_child=self.with_pending(number))
            self.assertEqual(outcome.code, RESTART, outcome)
            self.assertIn("stopping after step", outcome.stdout)

    def test_without_a_folder_for_checkpoints_it_ends_the_program(self):
        for arguments in (("train", self.config(train={"steps": 10**9})), ("keys",)):
            outcome = self.run_invar(*arguments, in_child=self.with_pending(signal.SIGTERM))
            self.assertEqual(outcome.code, -signal.SIGTERM, outcome)
            self.assertEqual(outcome.stdout, "")


if __name__ == "__main__":
    unittest.main()
