"""Checkpoints: a run that goes on equals one that was never interrupted, damage is found and named, and weights go out and
in again to the bit."""
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

import invar_job
from invar_job import (FAILURE_SECONDS, RUN_SECONDS, SEQUENCE, JobTest, ids_of, last_by_step,
                       read_safetensors_header, series, wait_until)

USAGE, DATA, FAULT = 2, 3, 1

TENSOR = {"tensor": 2, "sequence": "true"}
LAYOUTS = {"tensor": TENSOR, "data": {"data": 2}}  # of two ranks


def find_latest(path):
    """The checkpoint that invar finds at a path."""
    if path.name.startswith("step_"):
        return path
    folder = path / "checkpoints" if (path / "checkpoints").exists() else path
    return folder / (folder / "latest").read_text().strip()


class CheckpointTest(JobTest):
    """Runs of the small model that save every tenth step of twenty; what they are compared with, and by."""

    STEPS = 20

    def recipe(self, **sections):
        """run.yaml: weights that move, a schedule that knows where it stands, and checkpoints."""
        merged = {"optimizer": {"lr": 1e-2}, "schedule": {"kind": "cosine", "warmup_steps": 3, "min_lr": 1e-3},
                  "train": {"steps": self.STEPS}, "checkpoint": {"every": 10}}
        for name, section in sections.items():
            merged[name] = {**merged.get(name, {}), **section}
        return self.config(**merged)

    def checkpoint(self, run, step):
        return self.folder / run / "checkpoints" / f"step_{step:08}"

    def latest(self, run):
        return (self.folder / run / "checkpoints" / "latest").read_text().strip()

    def export(self, checkpoint):
        """Hugging Face folder of a run's latest checkpoint, or of a checkpoint; made once."""
        path = find_latest(self.folder / checkpoint)
        name = f"hf_{path.parent.parent.name}_{path.name}"
        if not (self.folder / name).exists():
            self.succeed("export", checkpoint, name)
        return name

    def check_same_run(self, run, reference):
        """The losses and gradient norms of every step, and the last weights, to the bit."""
        for key in ("loss", "grad_norm", "lr", "tokens"):
            self.assertEqual(last_by_step(self.folder / run, key), last_by_step(self.folder / reference, key), key)
        self.assertEqual(self.latest(run), self.latest(reference))
        self.succeed("compare", self.export(run), self.export(reference), "--exact")

    def stalled(self, run, step, *overrides, ranks=None):
        """A run that has come to its endless evaluation after `step`, with its checkpoints of before on disk."""
        process = self.start("train", "run.yaml", f"log.dir={run}", "checkpoint.async=false", f"train.eval_every={step}",
                             "train.eval_batches=1000000", *overrides, ranks=ranks)
        reached = wait_until(lambda: step in last_by_step(self.folder / run, "loss"), RUN_SECONDS)
        self.assertTrue(reached, "the run did not get there")
        return process

    def paused(self, run, step, ranks=None):
        """A run that stands still after `step`, with its checkpoints of before on disk."""
        pause = self.pause_at_step(run, step + 1)
        process = self.start("train", "run.yaml", f"log.dir={run}", "checkpoint.async=false", ranks=ranks,
                             pauses=[pause])
        self.reach(pause, process)
        return process

    def kill(self, process):
        """As the machine would: no rank can say anything."""
        victims = ids_of(process)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=RUN_SECONDS)
        self.assertNotEqual(process.returncode, 0)
        self.check_gone(victims)

    def inspect(self, checkpoint, *options):
        return self.succeed("inspect", checkpoint, *options).stdout

    def consumed(self, checkpoint):
        return int(re.search(r"(\d+) samples consumed", self.inspect(checkpoint))[1])


class Resume(CheckpointTest):
    def test_killed_run_goes_on_bit_for_bit(self):
        for name, layout in LAYOUTS.items():
            with self.subTest(name):
                self.recipe(parallel=layout)
                self.train(f"whole_{name}", ranks=2)
                self.kill(self.paused(f"killed_{name}", 15, ranks=2))
                self.assertEqual(self.latest(f"killed_{name}"), "step_00000010")
                outcome = self.succeed("train", "run.yaml", f"log.dir=killed_{name}", ranks=2)
                self.assertIn("step_00000010: step 10 of 20, 40 samples consumed", outcome.stdout)
                self.assertIn("step 11/20 | loss", outcome.stdout)
                self.assertNotIn("step 10/20 | loss", outcome.stdout)
                self.check_same_run(f"killed_{name}", f"whole_{name}")
                self.assertEqual(series(self.folder / f"killed_{name}", "step"),
                                 [*range(1, 16), *range(11, 21)])  # metrics went on in the file

    def test_bf16(self):
        self.recipe(parallel=TENSOR, numerics={"precision": "bf16"})
        self.train("whole", ranks=2)
        self.kill(self.paused("killed", 15, ranks=2))
        self.succeed("train", "run.yaml", "log.dir=killed", ranks=2)
        self.check_same_run("killed", "whole")

    def test_at_another_layout(self):
        self.recipe(parallel=TENSOR)
        self.train("whole", ranks=4)
        expected = last_by_step(self.folder / "whole", "loss")
        weights = self.export("whole")
        others = {"alone": (["parallel.tensor=1", "parallel.sequence=false"], None),
                  "data": (["parallel.tensor=1", "parallel.sequence=false"], 4),
                  "uneven": (["parallel.tensor=3", "parallel.uneven=true"], 3)}
        for name, (layout, ranks) in others.items():
            with self.subTest(name):
                self.train(name, f"checkpoint.resume={self.checkpoint('whole', 10)}", *layout, ranks=ranks)
                found = last_by_step(self.folder / name, "loss")
                self.assertEqual(list(found), list(range(11, 21)))
                for step, loss in found.items():
                    self.assertAlmostEqual(loss, expected[step], delta=1e-5)
                self.succeed("compare", self.export(name), weights, "--rtol", "1e-4")
        differs = self.run_invar("compare", self.export(self.checkpoint("whole", 10)), weights, "--rtol", "1e-4")
        self.assertEqual(differs.code, 1)  # so that weights of ten steps earlier would not have passed

    def test_never_path_and_auto(self):
        self.recipe()
        losses = self.train("run")
        self.assertEqual(self.train("other", "checkpoint.resume=run", "train.steps=21")[1:], [])  # step 21 alone
        self.assertEqual(last_by_step(self.folder / "other", "step"), {21: 21})
        for path in ("run", "run/checkpoints", "run/checkpoints/step_00000010"):
            with self.subTest(path):
                shutil.rmtree(self.folder / "other")
                outcome = self.succeed("train", "run.yaml", f"checkpoint.resume={path}", "log.dir=other",
                                       "train.steps=21")
                first = 11 if path.endswith("10") else 21
                self.assertEqual(last_by_step(self.folder / "other", "step"), {n: n for n in range(first, 22)})
                self.assertIn("train.steps: 20 -> 21", outcome.stdout)
        again = self.train("run", "checkpoint.resume=never", "train.steps=10", "schedule.decay_steps=20")
        self.assertEqual(again, losses[:10])
        self.assertTrue((self.folder / "run" / "metrics.1.jsonl").exists())
        earlier = self.folder / "run/checkpoints/earlier.1"  # with `latest` and all that was there
        self.assertEqual((earlier / "latest").read_text(), "step_00000020\n")
        self.succeed("inspect", earlier, "--verify")
        self.assertEqual(self.latest("run"), "step_00000010")
        self.assertEqual(self.train("run"), losses)  # on from what `latest` names, not from the higher number

    def test_path_to_nothing(self):
        self.recipe()
        (self.folder / "empty").mkdir()
        for path in ("nowhere", "empty"):
            for ranks in (None, 3):
                self.fail_with(DATA, f"{path}: neither a checkpoint", "checkpoint.dir", ranks=ranks,
                               arguments=["train", "run.yaml", "log.dir=run", f"checkpoint.resume={path}",
                                          "parallel.uneven=true", f"parallel.tensor={ranks or 1}"])

    def test_all_steps_are_trained_already(self):
        self.recipe(parallel=TENSOR)
        self.train("run", ranks=2)
        before = (self.folder / "run" / "metrics.jsonl").read_text()
        written = (self.checkpoint("run", 20) / "index.h5").stat().st_mtime_ns
        outcome = self.succeed("train", "run.yaml", "log.dir=run", "checkpoint.export_dir=hf", ranks=2)
        self.assertIn("step 20 is trained already", outcome.stdout)
        self.assertNotIn("| loss", outcome.stdout)
        self.assertEqual((self.folder / "run" / "metrics.jsonl").read_text(), before)
        self.assertEqual((self.checkpoint("run", 20) / "index.h5").stat().st_mtime_ns, written)
        self.succeed("compare", "hf", self.export("run"), "--exact")

    def test_kept_checkpoints(self):
        self.recipe(checkpoint={"every": 2, "keep": 2, "keep_every": 6})
        self.train("run")
        self.assertEqual(sorted(path.name for path in (self.folder / "run" / "checkpoints").iterdir()),
                         ["latest", "lock", *(f"step_{step:08}" for step in (6, 12, 18, 20))])


class SameCommand(CheckpointTest):
    """What a requeued job does: the same command, until it is done."""

    def test_from_imported_weights(self):
        self.recipe()
        self.train("first")
        self.succeed("import", self.export("first"), "imported")
        command = ["train", "run.yaml", "log.dir=run", "checkpoint.resume=imported"]
        outcome = self.run_invar(*command, "train.exit_after_steps=8")
        self.assertEqual(outcome.code, 75, outcome)
        self.assertIn("fresh moments", outcome.stdout)
        outcome = self.succeed(*command)
        self.assertIn("resumed from run/checkpoints/step_00000008", outcome.stdout)
        self.train("whole", "checkpoint.resume=imported")
        self.check_same_run("run", "whole")

    def test_done_and_started_again(self):
        self.recipe()
        command = ["train", "run.yaml", "log.dir=run", "checkpoint.export_dir=hf"]
        self.succeed(*command)
        before = (self.folder / "hf" / "model.safetensors").read_bytes()
        self.succeed(*command)
        self.assertEqual((self.folder / "hf" / "model.safetensors").read_bytes(), before)
        self.fail_with(USAGE, "hf holds model.safetensors",
                       arguments=["train", "run.yaml", "log.dir=other", "checkpoint.export_dir=hf"])

    def test_an_evaluation_that_was_broken_off(self):
        for step in (7, self.STEPS):
            with self.subTest(step=step):
                self.recipe()
                run = f"run_{step}"
                process = self.stalled(run, step)
                process.send_signal(signal.SIGUSR1)
                self.assertEqual(self.finish(process, time.monotonic(), RUN_SECONDS).code, 75)
                self.assertEqual(series(self.folder / run, "validation_loss"), [])
                self.succeed("train", "run.yaml", f"log.dir={run}", f"train.eval_every={step}", "train.eval_batches=2")
                found = last_by_step(self.folder / run, "validation_loss")
                self.assertEqual(sorted(found), sorted({step, 2 * step if 2 * step < self.STEPS else step, self.STEPS}))
                whole = f"whole_{step}"
                self.train(whole, f"train.eval_every={step}", "train.eval_batches=2")
                self.assertEqual(found, last_by_step(self.folder / whole, "validation_loss"))

    def test_another_job_in_the_folder(self):
        self.recipe(parallel=TENSOR)
        process = self.paused("run", 7, ranks=2)
        outcome = self.run_invar("train", "run.yaml", "log.dir=run", ranks=2)  # waits for a while
        self.check_failure(outcome, USAGE, "log.dir: run: another run writes its log and metrics here")
        self.kill(process)
        self.succeed("train", "run.yaml", "log.dir=run", ranks=2)

    def test_ranks_that_see_different_folders(self):
        self.recipe(parallel=TENSOR)
        outcome = self.run_invar("train", "run.yaml", "log.dir=run", "train.exit_after_steps=6", ranks=2)
        self.assertEqual(outcome.code, 75, outcome)
        arguments = [invar_job.INVAR, "train", "run.yaml", "log.dir=run"]
        since = time.monotonic()
        process = subprocess.Popen([*invar_job.LAUNCH, "-n", "1", *arguments, "checkpoint.dir=run/checkpoints",
                                    ":", "-n", "1", *arguments, "checkpoint.dir=elsewhere"], cwd=self.folder,
                                   env=invar_job.ENVIRONMENT, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(lambda: invar_job.end(process) if process.poll() is None else None)
        outcome = self.finish(process, since, FAILURE_SECONDS)
        self.check_failure(outcome, DATA, "others found something else", "a file system that all hosts share")


class Changes(CheckpointTest):
    """A resumed run with another config."""

    def setUp(self):
        super().setUp()
        self.recipe(train={"steps": 10}, schedule={"decay_steps": 20})
        self.train("run")

    def test_recipe_is_told(self):
        outcome = self.succeed("train", "run.yaml", "log.dir=run", "optimizer.lr=0.02", "train.steps=11",
                               "train.eval_every=5", "log.every=3")
        self.assertIn("  optimizer.lr: 0.01 -> 0.02\n", outcome.stdout)
        self.assertIn("  train.steps: 10 -> 11\n", outcome.stdout)
        self.assertEqual(outcome.stdout.count(" -> "), 2, outcome)  # evaluations and logs do not matter
        self.assertIn("optimizer.lr: 0.01 -> 0.02", (self.folder / "run" / "log.txt").read_text())

    def test_model_and_numerics_are_refused(self):
        changes = {"model.hidden_size": ("64", "48"), "model.num_hidden_layers": ("3", "2"),
                   "model.rope_theta": ("500", "1000000"), "numerics.precision": ("bf16", "fp32")}
        for key, (now, before) in changes.items():
            for ranks in (None, 2):
                with self.subTest(key, ranks=ranks):
                    outcome = self.fail_with(USAGE, f"{key} is {now}, but the checkpoint was saved with {before}",
                                             f"use {key}: {before}", "checkpoint.resume: never", ranks=ranks,
                                             arguments=["train", "run.yaml", "log.dir=run", f"{key}={now}"])
                    self.assertNotIn("| loss", outcome.stdout)
        self.assertEqual(self.consumed("run"), 40)  # nothing was touched

    def test_data_goes_on_where_it_was(self):
        """With weights that stay, the loss of a batch of eight is the mean of two batches of four."""
        still = ["optimizer.lr=0", "schedule.kind=constant", "schedule.warmup_steps=0", "schedule.decay_steps=auto",
                 "schedule.min_lr=0", "checkpoint.resume=run/checkpoints/step_00000010"]
        fours = self.train("fours", *still, "train.steps=14")
        outcome = self.succeed("train", "run.yaml", "log.dir=eights", *still, "train.steps=12",
                               "train.global_batch_size=8")
        self.assertIn("  train.global_batch_size: 4 -> 8\n", outcome.stdout)
        eights = series(self.folder / "eights", "loss")
        self.assertEqual((len(fours), len(eights)), (4, 2))
        for i, loss in enumerate(eights):
            self.assertAlmostEqual(loss, (fours[2 * i] + fours[2 * i + 1]) / 2, delta=1e-5)
        self.assertGreater(abs(fours[0] - fours[2]), 1e-3)  # batches differ by more than that
        self.assertEqual(self.consumed("fours"), 40 + 4 * 4)
        self.assertEqual(self.consumed("eights"), 40 + 2 * 8)
        self.assertIn(f"{56 * SEQUENCE} tokens trained on", self.inspect("eights"))


class Contracts(CheckpointTest):
    """Runs that go on with invariant numerics, and those that may not."""

    REDUCTION = "numerics.reduction=invariant"
    INVARIANT = [REDUCTION, "numerics.workers=4"]

    def resume(self, *overrides, ranks=None):
        return self.succeed("train", "run.yaml", "log.dir=run", *overrides, ranks=ranks)

    def contract_of(self, outcome):
        return re.search(r"numerics contract ([0-9a-f]{16}): version 2, precision fp32, (.*)", outcome.stdout)

    def test_another_contract_is_refused(self):
        self.recipe(train={"steps": 10}, schedule={"decay_steps": 20})
        told = self.contract_of(self.resume(*self.INVARIANT))
        self.assertEqual(told[2], f"arithmetic fma-chain, leaves 8, workers 4, token_block 1, head_chunk_tokens {SEQUENCE}, "
                         "head_runs 2")
        self.assertIn(f"contract    {told[1]}\n", self.inspect("run"))
        changes = [([self.REDUCTION, "numerics.workers=2"], "workers", 2, 4, "set numerics.workers: 4"),
                   ([*self.INVARIANT, "numerics.leaves=3"], "leaves", 3, 8, "set numerics.leaves: 8"),
                   ([*self.INVARIANT, f"train.sequence_length={SEQUENCE // 2}"], "head_chunk_tokens", SEQUENCE // 2,
                    SEQUENCE, f"set train.sequence_length: {SEQUENCE}")]
        for overrides, field, now, before, fix in changes:
            for ranks in (None, 2):
                with self.subTest(field, ranks=ranks):
                    self.fail_with(USAGE, f"{field} of the numerics contract is {now}, but the checkpoint was saved with "
                                   f"{before}", fix, "invar export, invar import", ranks=ranks,
                                   arguments=["train", "run.yaml", "log.dir=run", *overrides])
        again = self.resume(*self.INVARIANT, "train.steps=12", "parallel.tensor=2", ranks=2)  # another layout: the same
        self.assertEqual(self.contract_of(again)[1], told[1])
        self.assertNotIn("from here on", again.stdout + again.stderr)
        self.succeed("import", self.export("run"), "imported")  # the way that is offered
        self.train("other", self.REDUCTION, "numerics.workers=2", "checkpoint.resume=imported")

    def test_fast_and_invariant_and_back(self):
        self.recipe(train={"steps": 10}, schedule={"decay_steps": 20})
        self.assertIsNone(self.contract_of(self.resume()))
        self.assertNotIn("contract", self.inspect("run"))
        for step, overrides, change in ((12, self.INVARIANT, "fast -> invariant"), (14, [], "invariant -> fast")):
            with self.subTest(change):
                outcome = self.resume(f"train.steps={step}", *overrides)
                self.assertIn(f"numerics.reduction: {change}\n", outcome.stdout)
                warning = f"from here on the bits are those of numerics.reduction: {change.split()[-1]}"
                self.assertIn(warning, outcome.stdout + outcome.stderr)
                self.assertIn(warning, (self.folder / "run" / "log.txt").read_text())
                self.assertIn(f"step {step}/{step} | loss", outcome.stdout)

    def test_evaluation_with_other_sums(self):
        """Layouts that the contract does not have, as eight ranks of four leaves, can still evaluate."""
        self.recipe(train={"steps": 10}, schedule={"decay_steps": 20})
        self.resume(*self.INVARIANT, "numerics.leaves=4")
        self.fail_with(USAGE, "parallel.tensor = 8 exceeds 4 leaves", "numerics.leaves: 8 (other bits)", ranks=8,
                       arguments=["eval", "run", "parallel.tensor=8"])
        self.succeed("eval", "run", "parallel.tensor=8", "numerics.reduction=fast", ranks=8)


class Inspect(CheckpointTest):
    def test_output(self):
        self.recipe(parallel=TENSOR)
        self.train("run", ranks=4)
        for path in ("run", "run/checkpoints", "run/checkpoints/step_00000020"):
            text = self.inspect(path, "--verify")
            for line in ("checkpoint  run/checkpoints/step_00000020", "step        20",
                         f"data        80 samples consumed, {80 * SEQUENCE} tokens trained on",
                         "written at  tensor 2 with sequence parallelism x data 2", "    hidden_size: 48",
                         "    precision: fp32", "verified: every checksum is right"):
                self.assertIn(line, text.splitlines())
            self.assertRegex(text, r"(?m)^files       4 of \d\.\d MiB in all$")
        self.assertIn("step        10\n", self.inspect("run/checkpoints/step_00000010"))
        table = self.inspect("run", "--tensors")
        self.assertRegex(table, r"(?m)^model/lm_head\.weight +\(250, 48\) +\d+$")
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            self.assertEqual(len(re.findall(rf"(?m)^{kind}/\S+ +\(", table)), 25, table)
        twice = self.succeed("inspect", "run", ranks=2)
        self.assertEqual(twice.stdout.count("written at"), 1)


class Damage(CheckpointTest):
    NAME = "model.layers.1.mlp.up_proj.weight"

    def setUp(self):
        super().setUp()
        self.recipe(parallel={"data": "auto"}, train={"global_batch_size": 12}, checkpoint={"every": 5, "keep": 5})
        self.train("run", "train.steps=10", "schedule.decay_steps=20", ranks=3)

    def refuse(self, *texts):
        """By inspect --verify, export and train, at one rank and at three."""
        hurt = self.run_invar("inspect", "run", "--verify", seconds=FAILURE_SECONDS)
        self.check_failure(hurt, DATA, *texts)
        self.assertNotIn("verified", hurt.stdout)
        for ranks in (None, 3):
            with self.subTest(ranks=ranks):
                outcome = self.fail_with(DATA, *texts, arguments=["train", "run.yaml", "log.dir=run"], ranks=ranks)
                self.assertNotIn("| loss", outcome.stdout)

    def shard_with(self, values):
        for shard in sorted(self.checkpoint("run", 10).glob("shard_*.h5")):
            offset = shard.read_bytes().find(values)
            if offset >= 0:
                return shard, offset
        self.fail("no shard has these values")

    def weight_row(self):
        """Bytes of the first row of a weight, as the checkpoint must hold them somewhere."""
        folder = self.folder / self.export("run")
        offsets = read_safetensors_header(folder / "model.safetensors")[self.NAME]["data_offsets"]
        data = (folder / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little") + offsets[0]
        return data[begin:begin + 4 * 48]

    def test_flipped_byte(self):
        shard, offset = self.shard_with(self.weight_row())
        data = bytearray(shard.read_bytes())
        data[offset + 5] ^= 1
        shard.write_bytes(data)
        self.refuse(f"step_00000010/{shard.name}", f"model/{self.NAME}")
        self.assertIn("step        10", self.inspect("run"))  # without --verify nothing was read
        self.succeed("inspect", self.checkpoint("run", 5), "--verify")
        outcome = self.succeed("train", "run.yaml", "log.dir=run", f"checkpoint.resume={self.checkpoint('run', 5)}")
        self.assertIn("step 6/20 | loss", outcome.stdout.replace("step  6", "step 6"))

    def test_missing_shard(self):
        (self.checkpoint("run", 10) / "shard_00001.h5").unlink()
        self.refuse("step_00000010/shard_00001.h5")

    def test_truncated_shard(self):
        path = self.checkpoint("run", 10) / "shard_00002.h5"
        path.write_bytes(path.read_bytes()[:-100])
        self.refuse("step_00000010/shard_00002.h5")

    def test_damaged_index(self):
        path = self.checkpoint("run", 10) / "index.h5"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        self.refuse("step_00000010/index.h5")

    def test_damaged_table(self):
        path = self.checkpoint("run", 10) / "index.bin"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        self.refuse("step_00000010/index.bin: damaged")

    def test_own_checkpoints_that_cannot_be_read(self):
        latest = self.folder / "run" / "checkpoints" / "latest"
        latest.unlink()
        latest.symlink_to("latest")  # a loop, which is another error than that there is none
        self.refuse("run/checkpoints/latest: cannot be looked at", "Too many levels of symbolic links")

    def test_latest_names_nothing(self):
        (self.folder / "run" / "checkpoints" / "latest").write_text("step_00000077\n")
        self.refuse("run/checkpoints/latest: names step_00000077", "name of another checkpoint")
        (self.folder / "run" / "checkpoints" / "latest").unlink()
        self.assertIn("step        10\n", self.inspect("run"))  # then the newest one counts

    def test_what_a_kill_left_is_no_checkpoint(self):
        checkpoints = self.folder / "run" / "checkpoints"
        shutil.copytree(self.checkpoint("run", 10), checkpoints / "step_00000015.tmp")
        (checkpoints / "step_00000017").mkdir()
        (checkpoints / "step_00000017" / "shard_00000.h5").write_text("a checkpoint that is just being copied in")
        (checkpoints / "latest").unlink()
        self.assertIn("step        10\n", self.inspect("run"))
        outcome = self.succeed("train", "run.yaml", "log.dir=run")
        self.assertFalse((checkpoints / "step_00000015.tmp").exists())
        self.assertIn("old checkpoints: removed step_00000015.tmp", outcome.stdout)
        self.assertIn("old checkpoints: removed step_00000015.tmp", (self.folder / "run" / "log.txt").read_text())
        self.assertTrue((checkpoints / "step_00000017" / "shard_00000.h5").exists())
        self.assertEqual(self.latest("run"), "step_00000020")


class ExportImport(CheckpointTest):
    def test_export_of_a_checkpoint_is_what_the_run_exported(self):
        for precision in ("fp32", "bf16"):
            self.recipe(parallel=TENSOR, numerics={"precision": precision})
            self.train(precision, f"checkpoint.export_dir=out_{precision}", ranks=4)
            exported = self.folder / self.export(precision)
            for name in ("model.safetensors", "config.json"):
                with self.subTest(precision, file=name):
                    self.assertEqual((exported / name).read_bytes(),
                                     (self.folder / f"out_{precision}" / name).read_bytes())

    def test_export_options(self):
        self.recipe()
        self.train("run")
        self.succeed("export", "run", "bf16", "--dtype", "bf16")
        header = read_safetensors_header(self.folder / "bf16" / "model.safetensors")
        self.assertEqual({entry["dtype"] for name, entry in header.items() if name != "__metadata__"}, {"BF16"})
        self.fail_with(USAGE, "--dtype", "fp32", "bf16", arguments=["export", "run", "other", "--dtype", "fp16"])
        self.fail_with(USAGE, "bf16 holds model.safetensors", arguments=["export", "run", "bf16"])
        self.fail_with(DATA, "nowhere", arguments=["export", "nowhere", "other"])
        self.assertFalse((self.folder / "other").exists())

    def test_there_and_back(self):
        self.recipe(parallel=TENSOR)
        self.train("run", ranks=2)
        weights = self.export("run")
        self.succeed("import", weights, "imported")
        text = self.inspect("imported", "--verify")
        self.assertIn("weights alone, no moments", text)
        self.assertIn("step        0\n", text)
        self.assertNotIn("precision", text)  # weights suit any
        self.succeed("compare", self.export("imported"), weights, "--exact")
        self.fail_with(USAGE, "imported holds checkpoints already", arguments=["import", weights, "imported"])

        outcome = self.succeed("train", "run.yaml", "log.dir=resumed", "checkpoint.resume=imported", ranks=2)
        self.assertIn("weights of imported/step_00000000, fresh moments", outcome.stdout)
        hf = self.write("hf.yaml", (self.folder / "run.yaml").read_text().replace("model:", "model:\n  init: hf\n"
                                                                                 f"  hf_path: {weights}"))
        losses = self.train("from_hf", config=hf, ranks=2)
        self.assertEqual(series(self.folder / "resumed", "loss"), losses)
        self.assertNotEqual(series(self.folder / "run", "loss"), losses)
        self.check_same_run("resumed", "from_hf")


class Eval(CheckpointTest):
    def losses(self, text):
        return re.findall(r"step +(\d+)/20 \| validation loss (\d+\.\d+)", text)

    def test_loss_that_the_run_printed(self):
        self.recipe(parallel=TENSOR, train={"eval_every": 10, "eval_batches": 3})
        printed = self.losses(self.succeed("train", "run.yaml", "log.dir=run", ranks=4).stdout)
        self.assertEqual([step for step, _ in printed], ["10", "20"])
        self.assertNotEqual(printed[0][1], printed[1][1])
        for step, loss in printed:
            for layout, ranks in (([], None), (["parallel.tensor=2", "parallel.sequence=true"], 2),
                                  (["train.global_batch_size=12", "train.eval_batches=1"], 3)):
                with self.subTest(step=step, ranks=ranks):
                    path = self.checkpoint("run", int(step))
                    [found] = self.losses(self.succeed("eval", path, *layout, ranks=ranks).stdout)
                    self.assertEqual(found[0], step)
                    self.assertAlmostEqual(float(found[1]), float(loss), delta=1.01e-4)
        [other] = self.losses(self.succeed("eval", "run", "train.eval_batches=1").stdout)
        self.assertNotEqual(other[1], printed[1][1])
        self.fail_with(USAGE, "model.hidden_size", arguments=["eval", "run", "model.hidden_size=50.5"])


if __name__ == "__main__":
    unittest.main()
