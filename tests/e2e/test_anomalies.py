"""Losses that are not finite, and losses that stand out."""
import array
import functools
import math
import re
import shutil
import unittest

import invar_job
import test_checkpoints
from invar_job import (REFERENCE, SEQUENCE, VOCABULARY, last_by_step, read_lines, series, tamper_floats, to_yaml,
                       write_tokens)
from test_checkpoints import FAULT, TENSOR

TOKENS = {"kind": "tokens", "path": "tokens.bin", "token_dtype": "uint16"}
UNEQUAL = {"tensor": 3, "nonuniform": "{tensor_widths: [3, 2]}"}
LAYOUTS = (({}, None), (TENSOR, 4), (UNEQUAL, 5))


class NotFinite(test_checkpoints.CheckpointTest):
    """A model that one token makes overflow, which occurs in one sample of the data.

    Of one column of the residual stream that token alone has a value before the first MLP, which squares it times 1e20.
    """

    BAD_TOKEN = 7
    COLUMN, COLUMNS, HEADS = 5, 48, 256
    LR = 1e-30  # so small that no other token gets a value in that column that matters
    BAD_SAMPLE = 9
    SAMPLES = 40  # at four a step, each comes once in ten steps

    def setUp(self):
        super().setUp()
        shutil.copytree(REFERENCE / "qwen3_untied", self.folder / "hf")
        tamper_floats(self.folder / "hf" / "model.safetensors", "model.embed_tokens.weight", self.only_one_token)
        for name, cols, value in (("self_attn.o_proj", self.HEADS, None), ("mlp.gate_proj", self.COLUMNS, 1e20),
                                  ("mlp.up_proj", self.COLUMNS, 1e20)):
            tamper_floats(self.folder / "hf" / "model.safetensors", f"model.layers.0.{name}.weight",
                          functools.partial(self.change_row, cols, value))
        tokens = [10 + i * i % (VOCABULARY - 10) for i in range(self.SAMPLES * SEQUENCE + 1)]
        tokens[self.BAD_SAMPLE * SEQUENCE + 5] = self.BAD_TOKEN
        write_tokens(self.folder / "tokens.bin", tokens)

    def only_one_token(self, values):
        for token in range(len(values) // self.COLUMNS):
            values[token * self.COLUMNS + self.COLUMN] = 1.0 if token == self.BAD_TOKEN else 0.0

    def change_row(self, cols, value, values):
        """Row COLUMN reads nothing, or COLUMN alone times the value."""
        values[self.COLUMN * cols:(self.COLUMN + 1) * cols] = array.array("f", bytes(4 * cols))
        if value is not None:
            values[self.COLUMN * cols + self.COLUMN] = value

    def bad_run(self, layout, **sections):
        fields = {**invar_job.SMALL, "model": {"hf_path": "hf", "init": "hf"}, "parallel": layout, "data": TOKENS,
                  "optimizer": {"lr": self.LR}, "checkpoint": {"every": 1, "keep": 20}, **sections}
        fields["train"] = {**invar_job.SMALL["train"], "steps": 10, **sections.get("train", {})}
        return self.write("run.yaml", to_yaml(fields))

    def test_stop(self):
        for layout, ranks in LAYOUTS:
            with self.subTest(ranks=ranks):
                self.bad_run(layout)
                run = f"stop_{ranks}"
                outcome = self.fail_with(FAULT, "not finite", "first in the output of decoder layer 0",
                                         "this step changed no weights", "train.on_nonfinite: skip",
                                         arguments=["train", "run.yaml", f"log.dir={run}"], ranks=ranks)
                step = int(re.search(r"error: (?:rank 0: )?step (\d+): loss", outcome.errors[0])[1])
                self.assertEqual(len(series(self.folder / run, "loss")), step - 1)
                if step > 1:
                    self.assertEqual(self.latest(run), f"step_{step - 1:08}")  # what was in flight is complete
                    self.inspect(run, "--verify")

    def test_skip(self):
        for layout, ranks in LAYOUTS:
            with self.subTest(ranks=ranks):
                self.bad_run(layout, train={"on_nonfinite": "skip"})
                run = f"skip_{ranks}"
                outcome = self.succeed("train", "run.yaml", f"log.dir={run}", ranks=ranks)
                lines = {line["step"]: line for line in read_lines(self.folder / run / "metrics.jsonl")}
                self.assertEqual(sorted(lines), list(range(1, 11)))
                [bad] = [step for step, line in lines.items() if line["loss"] is None]
                for step, line in lines.items():
                    self.assertEqual(line.get("skipped_steps", 0), int(step >= bad))
                text = outcome.stdout + outcome.stderr
                self.assertEqual(text.count("left out"), 1, outcome)
                self.assertRegex(text, rf"warning: step {bad}: .*not finite, first in the output of decoder layer 0; "
                                       r"left out \(1 so far\)")
                self.assertIn(f"step {bad}: ", (self.folder / run / "log.txt").read_text())
                self.assertIn("step        10, 1 skipped\n", self.inspect(run))
                self.assertIn(f"40 samples consumed, {40 * SEQUENCE} tokens", self.inspect(run))
                self.assertIn(bad, range(2, 10))
                self.check_only_this_step_changed_nothing(run, bad, ranks)

    def check_only_this_step_changed_nothing(self, run, bad, ranks):
        """No checkpoint is due after it; a run that stops there saves what the step before left."""
        self.assertFalse(self.checkpoint(run, bad).exists())
        short = f"short_{ranks}"
        outcome = self.run_invar("train", "run.yaml", f"log.dir={short}", f"train.exit_after_steps={bad}", ranks=ranks)
        self.assertEqual(outcome.code, 75, outcome)
        before = self.export(self.checkpoint(run, bad - 1))
        self.succeed("compare", self.export(self.checkpoint(short, bad)), before, "--exact")
        after = self.run_invar("compare", self.export(self.checkpoint(run, bad + 1)), before, "--exact")
        self.assertEqual(after.code, 1, after)

    def test_the_count_goes_on_with_the_run(self):
        self.bad_run({}, train={"on_nonfinite": "skip"})
        self.train("run")
        outcome = self.run_invar("train", "run.yaml", "log.dir=run", "train.steps=20", "train.exit_after_steps=9")
        self.assertEqual(outcome.code, 75, outcome)
        self.assertEqual(self.run_invar("train", "run.yaml", "log.dir=run", "train.steps=20").code, 0)
        self.assertIn("step        20, 2 skipped\n", self.inspect("run"))
        self.assertEqual(series(self.folder / "run", "skipped_steps")[-1], 2)
        last = last_by_step(self.folder / "run", "loss")
        self.assertEqual(sorted(step <= 10 for step, loss in last.items() if loss is None), [False, True])

    def test_gradient_alone(self):
        """Huge weights: the forward pass is finite, the gradient is not."""
        self.config(optimizer={"lr": 1e30})
        self.fail_with(FAULT, "step 2: ", "the forward pass is finite",
                       "in backward first in the gradient of model.layers.1.", arguments=["train", "run.yaml"])


class NoTokens(test_checkpoints.CheckpointTest):
    """Data of which data.eod_mask_loss leaves out every token: there is no loss, and no perfect one."""

    EOD = 7
    MASKED = {**TOKENS, "validation_fraction": 0.5, "eod_mask_loss": "true", "eod_id": EOD}

    def masked(self, layout, tokens, **train):
        write_tokens(self.folder / "tokens.bin", tokens)
        self.config(parallel=layout, data=self.MASKED, optimizer={"lr": 1e-2}, train={"eval_every": 4, **train},
                    checkpoint={"every": 1, "keep": 20})

    def test_a_step_without_counted_tokens_changes_nothing_and_eleven_in_a_row_end_the_run(self):
        for layout, ranks in LAYOUTS:
            with self.subTest(ranks=ranks):
                self.masked(layout, [self.EOD] * (64 * SEQUENCE), steps=20)
                run = f"none_{ranks}"
                outcome = self.fail_with(test_checkpoints.DATA, "step 11: none of its tokens counts", "the 10 steps before it",
                                         "data.eod_mask_loss: false", arguments=["train", "run.yaml", f"log.dir={run}"],
                                         ranks=ranks)
                lines = [line for line in read_lines(self.folder / run / "metrics.jsonl") if "loss" in line]
                self.assertEqual([line["loss"] for line in lines], [None] * 10)
                self.assertEqual([line["skipped_steps"] for line in lines], list(range(1, 11)))
                self.assertEqual([line["tokens"] for line in lines], [0] * 10)
                text = outcome.stdout + outcome.stderr
                self.assertRegex(text, r"warning: step 3: none of its tokens counts, .*data.eod_id = 7; left out \(3 so far\)")
                self.assertNotIn("perplexity", text)
                self.succeed("compare", self.export(self.checkpoint(run, 10)), self.export(self.checkpoint(run, 1)), "--exact")

    def test_an_evaluation_without_validation_data_says_what_to_pass(self):
        write_tokens(self.folder / "tokens.bin", [i % 200 for i in range(64 * SEQUENCE)])
        self.config(data=TOKENS, train={"steps": 1}, checkpoint={"every": 1})
        self.train("run")
        outcome = self.fail_with(test_checkpoints.USAGE, "run/checkpoints/step_00000001: its run kept no validation data",
                                 "pass data.validation_fraction=0.05", arguments=["eval", "run"], ranks=2)
        self.assertNotIn("eval_every", outcome.stderr)
        self.assertIn("validation loss", self.succeed("eval", "run", "data.validation_fraction=0.05").stdout)
        self.fail_with(test_checkpoints.USAGE, 'its run kept no validation data (data.split = "1")',
                       'pass data.split="95, 5, 0"', arguments=["eval", "run", "data.kind=megatron", 'data.split="1"',
                                                                'data.token_dtype=""'])

    def test_an_evaluation_without_counted_tokens_says_so(self):
        self.masked({}, [10 + i * i % 200 for i in range(32 * SEQUENCE)] + [self.EOD] * (32 * SEQUENCE), steps=4)
        outcome = self.succeed("train", "run.yaml", "log.dir=run", ranks=2)
        text = "no validation loss: of 31 samples no token counts"
        self.assertIn(f"warning: step 4/4 | {text}", outcome.stdout + outcome.stderr)
        self.assertEqual(series(self.folder / "run", "validation_loss"), [None])
        self.assertEqual(series(self.folder / "run", "validation_ppl"), [None])
        for ranks in (None, 2):
            self.fail_with(test_checkpoints.DATA, text, "data.eod_id = 7", arguments=["eval", "run"], ranks=ranks)


class Spikes(test_checkpoints.CheckpointTest):
    """A run that has learnt its data, which is one sample again and again, goes on with data that has another one."""

    SAMPLES = 32
    LEARNT = 64  # steps

    def write_data(self, odd=None):
        pattern = [(7 * i * i + 3 * i) % 100 for i in range(SEQUENCE)]
        tokens = pattern * self.SAMPLES + pattern[:1]
        if odd is not None:
            first = odd * SEQUENCE + 1  # the token before is also the last label of the sample before
            tokens[first:first + SEQUENCE - 1] = [100 + 9 * i for i in range(SEQUENCE - 1)]
        write_tokens(self.folder / "tokens.bin", tokens)

    def go_on(self, run, *overrides):
        return self.train(run, "checkpoint.resume=learnt", f"train.steps={self.LEARNT + self.SAMPLES}", *overrides)

    def late_sample(self):
        """A sample whose turn comes when there are losses to compare with, and its step."""
        self.write_data()
        self.config(data=TOKENS, optimizer={"lr": 3e-3}, checkpoint={"every": self.LEARNT},
                    train={"steps": self.LEARNT, "global_batch_size": 1})
        self.train("learnt")
        for odd in range(1, self.SAMPLES):
            self.write_data(odd)
            losses = self.go_on("order", "optimizer.lr=0", "checkpoint.every=0")
            turn = losses.index(max(losses))
            if 24 <= turn < self.SAMPLES - 2:
                return self.LEARNT + turn + 1
        self.fail("no sample comes late")

    def test_told_once(self):
        turn = self.late_sample()
        outcome = self.succeed("train", "run.yaml", "log.dir=run", "checkpoint.resume=learnt",
                               f"train.steps={self.LEARNT + self.SAMPLES}")
        warning = rf"warning: step {turn}: loss \d+\.\d+ is \d+\.\d standard deviations above the mean"
        self.assertEqual(len(re.findall(warning, outcome.stdout + outcome.stderr)), 1, outcome)
        self.assertEqual((self.folder / "run" / "log.txt").read_text().count("standard deviations above"), 1)
        self.assertEqual(list(last_by_step(self.folder / "run", "loss_zscore")), [turn])
        losses = series(self.folder / "run", "loss")[:turn - self.LEARNT]
        before = losses[:-1]
        mean = sum(before) / len(before)
        deviation = math.sqrt(sum((loss - mean) ** 2 for loss in before) / len(before))
        zscore = (losses[-1] - mean) / deviation
        self.assertAlmostEqual(last_by_step(self.folder / "run", "loss_zscore")[turn], zscore, delta=1e-6 * zscore)
        self.go_on("high", f"train.spike_zscore={zscore + 0.1}")
        self.go_on("never", "train.spike_zscore=0")
        for run in ("high", "never"):
            self.assertEqual(series(self.folder / run, "loss_zscore"), [])


if __name__ == "__main__":
    unittest.main()
