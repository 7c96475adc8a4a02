"""What invar does when all is well: the same losses at every layout, what a run leaves behind, and its way back in."""
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import unittest

import invar_job
from invar_job import (REFERENCE, ROOT, SEQUENCE, SMALL, VOCABULARY, JobTest, read_lines, read_safetensors_header, series,
                       tamper, to_yaml, write_tokens)

USAGE, DATA, FAULT = 2, 3, 1
ESCAPE = "\x1b"

STEP_LINE = re.compile(r"step ( *\d+)/(\d+) \| loss [ \d.]{6} \| grad norm [ \d.]{5} \| lr \d\.\d\de[+-]\d\d \| "
                       r"[ \d.]{4}[\dkMG] tok/s \| [ \d.]{4} (ms|s) *\| left (-:--:--|\d+:\d\d:\d\d)")

# name: keys of parallel, ranks (None: without mpirun)
LAYOUTS = {
    "alone": ({}, None),
    "one": ({}, 1),
    "tensor": ({"tensor": 2, "sequence": "true"}, 2),
    "uneven": ({"tensor": 3, "sequence": "true", "uneven": "true"}, 3),
    "tensor_data": ({"tensor": 2, "sequence": "true"}, 4),
}


def overrides(layout):
    return [f"parallel.{key}={value}" for key, value in layout.items()]


class PeriodicData(JobTest):
    """A token file with the period of a sample, so that every sample and every batch is the same."""

    def setUp(self):
        super().setUp()
        pattern = [(7 * i * i + 3 * i) % VOCABULARY for i in range(SEQUENCE)]
        write_tokens(self.folder / "periodic.bin", pattern * 20 + pattern[:1])
        self.sample = pattern + pattern[:1]

    def periodic(self, **sections):
        return self.config(data={"kind": "tokens", "path": "periodic.bin", "token_dtype": "uint16"}, **sections)


class Layouts(JobTest):
    def test_losses_agree(self):
        self.config(optimizer={"lr": 1e-2})
        losses = {name: self.train(name, *overrides(layout), ranks=ranks) for name, (layout, ranks) in LAYOUTS.items()}
        expected = losses["alone"]
        self.assertEqual(len(expected), 6)
        self.assertGreater(max(expected) - min(expected), 1e-2)  # the weights move: there is something to agree on
        for name, found in losses.items():
            with self.subTest(name):
                self.assertEqual(len(found), len(expected))
                for step, (loss, want) in enumerate(zip(found, expected), 1):
                    self.assertAlmostEqual(loss, want, delta=1e-5, msg=f"step {step}")
        self.assertEqual(losses["one"], expected)  # mpirun -n 1 changes no bit
        others = self.train("seed", "train.seed=5")
        self.assertGreater(abs(others[0] - expected[0]), 1e-4)  # and 1e-5 tells runs apart


class Evaluation(JobTest):
    """The validation loss of every layout, on data of each kind that keeps a part for it."""

    def test_validation_losses_agree(self):
        tokens = random.Random(4)
        write_tokens(self.folder / "random.bin", [tokens.randrange(VOCABULARY) for _ in range(64 * SEQUENCE + 1)])
        for data in ({"kind": "mock"},
                     {"kind": "tokens", "path": "random.bin", "token_dtype": "uint16", "validation_fraction": 0.25}):
            self.config(data=data, optimizer={"lr": 1e-2}, train={"eval_every": 2, "eval_batches": 3})
            found = {}
            for name in ("alone", "uneven", "tensor_data"):
                layout, ranks = LAYOUTS[name]
                run = f"{data['kind']}_{name}"
                losses = self.train(run, *overrides(layout), ranks=ranks)
                found[name] = series(self.folder / run, "validation_loss")
                self.assertNotIn(found[name][0], losses)  # other samples than those trained on
            expected = found["alone"]
            self.assertEqual(len(expected), 3)
            self.assertGreater(max(expected) - min(expected), 1e-3)  # the weights move between evaluations
            for name, losses in found.items():
                with self.subTest(data["kind"], layout=name):
                    self.assertEqual(len(losses), len(expected))
                    for loss, want in zip(losses, expected):
                        self.assertAlmostEqual(loss, want, delta=1e-5)


    def test_it_does_not_depend_on_the_batch(self):
        """A split of 13 samples, fewer than an evaluation might read: each of them counts once."""
        numbers = random.Random(4)
        write_tokens(self.folder / "random.bin", [numbers.randrange(VOCABULARY) for _ in range(52 * SEQUENCE + 4)])
        for reduction, workers in (("invariant", {"workers": 4}), ("fast", {})):
            self.config(data={"kind": "tokens", "path": "random.bin", "token_dtype": "uint16", "validation_fraction": 0.25},
                        numerics={"reduction": reduction, **workers}, optimizer={"lr": 1e-2}, train={"steps": 2, "eval_every": 2},
                        checkpoint={"every": 2})
            self.succeed("train", "run.yaml", f"log.dir={reduction}")
            self.assertIn("an evaluation reads 13 samples, all of the split",
                          (self.folder / reduction / "log.txt").read_text())
            self.assertEqual(series(self.folder / reduction, "validation_samples"), [13])
            [loss] = series(self.folder / reduction, "validation_loss")
            found = set()
            for batch, arguments, ranks in ((4, [], None), (5, [], None), (7, ["train.micro_batch_size=7"], None),
                                            (8, ["train.micro_batch_size=2", "parallel.tensor=2"], 4)):
                outcome = self.succeed("eval", reduction, f"train.global_batch_size={batch}", *arguments, ranks=ranks)
                found.add(outcome.stdout.splitlines()[-1])
            self.assertEqual(len(found), 1, found)
            self.assertRegex(found.pop(), rf"validation loss {loss:.4f} .* 13 samples$")


class MaskedLoss(JobTest):
    """data.eod_mask_loss where document ends are frequent and samples hold from none to many of them, so that ranks and
    micro-batches count different numbers of labels."""

    EOD = 7

    def setUp(self):
        super().setUp()
        numbers = random.Random(5)
        tokens = [self.EOD if numbers.random() < sample % 4 * 0.25 else numbers.randrange(10, VOCABULARY)
                  for sample in range(32) for _ in range(SEQUENCE)]
        write_tokens(self.folder / "ends.bin", [*tokens, 10])

    def losses(self, name, micro_batch, layout="alone", mask=True):
        keys = {"eod_mask_loss": "true", "eod_id": self.EOD} if mask else {}
        self.config(data={"kind": "tokens", "path": "ends.bin", "token_dtype": "uint16", **keys},
                    train={"micro_batch_size": micro_batch}, optimizer={"lr": 1e-2})
        parallel, ranks = LAYOUTS[layout]
        return self.train(name, *overrides(parallel), ranks=ranks)

    def test_losses_agree(self):
        expected = self.losses("whole", 4)
        self.assertEqual(len(expected), 6)
        others = {"accumulated": self.losses("accumulated", 1),
                  "tensor_data": self.losses("tensor_data", 2, "tensor_data"),
                  "tensor_data_accumulated": self.losses("tensor_data_accumulated", 1, "tensor_data")}
        for name, losses in others.items():
            with self.subTest(name):
                self.assertEqual(len(losses), len(expected))
                for step, (loss, want) in enumerate(zip(losses, expected), 1):
                    self.assertAlmostEqual(loss, want, delta=1e-5, msg=f"step {step}")
        for step, (loss, want) in enumerate(zip(self.losses("unmasked", 4, mask=False), expected), 1):
            self.assertGreater(abs(loss - want), 1e-3, f"step {step}")


class RunFolder(JobTest):
    """What a run leaves behind and prints."""

    RANKS = 2

    def setUp(self):
        super().setUp()
        self.config(parallel={"tensor": 2, "sequence": "true"}, optimizer={"lr": 1e-2},
                    schedule={"kind": "cosine", "warmup_steps": 2, "min_lr": 1e-3},
                    train={"eval_every": 3, "eval_batches": 2})

    def test_resolved_config_repeats_the_run(self):
        losses = self.train("first", ranks=self.RANKS)
        again = self.train("second", ranks=self.RANKS, config="first/config.yaml")
        self.assertEqual(again, losses)
        self.assertEqual(series(self.folder / "second", "validation_loss"),
                         series(self.folder / "first", "validation_loss"))
        configs = [(self.folder / name / "config.yaml").read_text() for name in ("first", "second")]
        self.assertEqual(configs[0].replace("dir: first", "dir: second"), configs[1])
        for key in ("lr: 0.01", "min_lr: 0.001", "seed: 1234", "eps: 1e-08"):  # given ones and defaults
            self.assertIn(f"  {key}\n", configs[0])

    def test_metrics(self):
        self.train("run", ranks=self.RANKS)
        lines = read_lines(self.folder / "run" / "metrics.jsonl")
        steps = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in steps], [1, 2, 3, 4, 5, 6])
        self.assertEqual([line["tokens"] for line in steps], [step * 4 * SEQUENCE for step in range(1, 7)])
        self.assertEqual([line["step"] for line in lines if "validation_loss" in line], [3, 6])
        self.assertEqual([round(line["lr"], 4) for line in steps[:2]], [0, 0.005])  # warm-up
        for line in steps:
            self.assertGreater(line["grad_norm"], 0)
            self.assertGreater(line["tokens_per_s"], 0)

    def test_log_every(self):
        outcome = self.succeed("train", "run.yaml", "log.dir=run", "log.every=4", ranks=self.RANKS)
        self.assertEqual(re.findall(r"step (\d)/6 \| loss", outcome.stdout), ["4", "6"])
        self.assertEqual([line["step"] for line in read_lines(self.folder / "run/metrics.jsonl") if "loss" in line],
                         [4, 6])

    def test_console_and_log(self):
        for ranks in (None, self.RANKS):
            with self.subTest(ranks=ranks):
                shape = [] if ranks else ["parallel.tensor=1", "parallel.sequence=false"]
                outcome = self.succeed("train", "run.yaml", f"log.dir=run{ranks}", *shape, ranks=ranks)
                lines = [re.sub(ESCAPE + r"\[\d*m", "", line) for line in outcome.stdout.splitlines()]
                steps = [line for line in lines if line.startswith("step ") and "validation" not in line]
                self.assertEqual(len(steps), 6, outcome)
                for number, line in enumerate(steps, 1):
                    found = STEP_LINE.fullmatch(line)
                    self.assertTrue(found, line)
                    self.assertEqual((int(found[1]), int(found[2])), (number, 6))
                self.assertEqual(sum("validation loss" in line for line in lines), 2)
                config = (self.folder / f"run{ranks}" / "config.yaml").read_text().splitlines()
                self.assertEqual(lines[:len(config)], config)  # a run begins by saying what it will do
                log = (self.folder / f"run{ranks}" / "log.txt").read_text()
                stamp = r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \| rank 0 \| info \| "
                self.assertEqual(re.sub(stamp, "", log).splitlines(), lines)
                self.assertEqual(len(re.findall(stamp, log)), len(lines))  # every line, those of the config too

    def test_no_colours_in_a_file(self):
        """Standard output is a pipe here, though mpirun hands its ranks a pseudo-terminal."""
        alone = self.succeed("train", "run.yaml", "parallel.tensor=1", "parallel.sequence=false")
        for outcome in (alone, self.succeed("train", "run.yaml", ranks=self.RANKS)):
            self.assertIn("step 6/6 | loss", outcome.stdout)
            self.assertNotIn(ESCAPE, outcome.stdout)


class ZeroLearningRate(PeriodicData):
    def test_loss_and_norm_are_constant_to_the_bit(self):
        for accumulation in (1, 4):
            for layout, ranks in ({}, None), ({"tensor": 2, "sequence": "true"}, 2):
                with self.subTest(accumulation=accumulation, ranks=ranks):
                    self.periodic(train={"steps": 10, "micro_batch_size": 4 // accumulation},
                                  optimizer={"lr": 0}, parallel=layout)
                    losses = self.train("still", ranks=ranks)
                    self.assertEqual(len(losses), 10)
                    self.assertEqual(len(set(losses)), 1, losses)
                    norms = series(self.folder / "still", "grad_norm")
                    self.assertEqual(len(set(norms)), 1, norms)

    def test_a_learning_rate_moves_both(self):
        self.periodic(train={"steps": 10}, optimizer={"lr": 1e-6})
        self.assertEqual(len(set(self.train("moving"))), 10)
        self.assertEqual(len(set(series(self.folder / "moving", "grad_norm"))), 10)


class ExportedRun(PeriodicData):
    """Trains and exports; the exported weights have the loss of the step after the last."""

    TRAINED = 3

    def export(self, precision):
        """Exports to hf; the losses of a run that goes on for one step more."""
        config = self.periodic(parallel={"tensor": 2, "sequence": "true"}, optimizer={"lr": 1e-2},
                               numerics={"precision": precision}, train={"steps": self.TRAINED})
        short = self.train("short", "checkpoint.export_dir=hf", ranks=4, config=config)
        losses = self.train("long", f"train.steps={self.TRAINED + 1}", ranks=4, config=config)
        self.assertEqual(losses[:-1], short)
        self.assertLess(losses[-1], losses[0] - 0.1)  # so that untrained weights could not pass
        return losses


class Export(ExportedRun):
    def first_loss(self, precision, layout, ranks):
        fields = {**SMALL, "model": {"hf_path": "hf", "init": "hf"}, "parallel": layout, "optimizer": {"lr": 0},
                  "numerics": {"precision": precision}, "train": {**SMALL["train"], "steps": 1},
                  "data": {"kind": "tokens", "path": "periodic.bin", "token_dtype": "uint16"}}
        self.write("again.yaml", to_yaml(fields))
        return self.train("again", ranks=ranks, config="again.yaml")[0]

    def check_header(self, dtype, torch_dtype):
        header = read_safetensors_header(self.folder / "hf" / "model.safetensors")
        header.pop("__metadata__", None)
        self.assertEqual({entry["dtype"] for entry in header.values()}, {dtype})
        self.assertEqual(header["model.layers.1.self_attn.k_proj.weight"]["shape"], [64, 48])
        self.assertEqual(header["model.embed_tokens.weight"]["shape"], [VOCABULARY, 48])  # without padding
        self.assertEqual(header["lm_head.weight"]["shape"], [VOCABULARY, 48])
        self.assertEqual(len(header), 2 * 11 + 3)
        config = json.loads((self.folder / "hf" / "config.json").read_text())
        self.assertEqual((config["torch_dtype"], config["vocab_size"], config["head_dim"]),
                         (torch_dtype, VOCABULARY, 16))

    def test_fp32(self):
        losses = self.export("fp32")
        self.check_header("F32", "float32")
        for layout, ranks in (({}, None), ({"tensor": 2, "sequence": "true"}, 2)):
            with self.subTest(ranks=ranks):
                self.assertAlmostEqual(self.first_loss("fp32", layout, ranks), losses[-1], delta=1e-6)

    def test_bf16(self):
        losses = self.export("bf16")
        self.check_header("BF16", "bfloat16")
        self.assertAlmostEqual(self.first_loss("bf16", {"tensor": 2, "sequence": "true"}, 4), losses[-1], delta=1e-6)
        self.assertAlmostEqual(self.first_loss("fp32", {}, None), losses[-1], delta=2e-2)

    def test_export_of_an_import_is_the_same_file(self):
        shutil.copytree(REFERENCE / "qwen3", self.folder / "hf")
        fields = {**SMALL, "model": {"hf_path": "hf", "init": "hf"}, "optimizer": {"lr": 0},
                  "parallel": {"tensor": 2}, "checkpoint": {"export_dir": "out"},
                  "train": {**SMALL["train"], "steps": 1}}
        self.succeed("train", self.write("copy.yaml", to_yaml(fields)), ranks=2)
        self.assertEqual(self.tensors(self.folder / "out"), self.tensors(self.folder / "hf"))

    def tensors(self, folder):
        """The bytes of every tensor, by name."""
        data = (folder / "model.safetensors").read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        return {name: data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]]
                for name, entry in header.items()}


class Parity(JobTest):
    def copy_case(self):
        shutil.rmtree(self.folder / "case", ignore_errors=True)
        return shutil.copytree(REFERENCE / "qwen3", self.folder / "case")

    def scale(self, path, name, factor):
        """The first ten values of a float32 tensor."""
        tamper(path, name, lambda data: struct.pack("<10f", *(factor * x for x in struct.unpack("<10f", data[:40])))
               + data[40:])

    def outside(self, outcome):
        """Rows of the table beyond their band."""
        self.assertEqual(outcome.code, 1, outcome)
        return [line.split("  ")[0] for line in outcome.stdout.splitlines() if line.endswith("OUTSIDE")]

    def test_cases_agree(self):
        for case in ("qwen3", "qwen3_untied", "qwen3_batch16"):
            outcome = self.succeed("parity", REFERENCE / case)
            self.assertNotIn("OUTSIDE", outcome.stdout)
            for row in ("hidden states", "logits", "loss of every step", "gradient self_attn.q_norm"):
                self.assertRegex(outcome.stdout, rf"(?m)^{row} .* ok$")

    def test_tampered_expectations(self):
        rows = {"logits": "logits", "hidden.2": "hidden states", "grad.model.layers.1.mlp.up_proj.weight":
                "gradient mlp.up_proj", "traj_loss": "loss of every step", "traj_grad_norm": "norm of every step's gradient"}
        for tensor, row in rows.items():
            with self.subTest(tensor):
                case = self.copy_case()
                self.scale(case / "expected.safetensors", tensor, 1.1)
                outcome = self.run_invar("parity", case)
                self.assertEqual(self.outside(outcome), [row], outcome)

    def test_tampered_weights_under_mpirun(self):
        case = self.copy_case()
        self.scale(case / "model.safetensors", "model.layers.3.self_attn.q_norm.weight", 1.1)
        outcome = self.run_invar("parity", case, "parallel.tensor=2", ranks=2)
        self.assertEqual(outcome.code, 1, outcome)
        self.assertRegex(outcome.stdout, r"gradient self_attn.q_norm .* OUTSIDE")

    def test_bf16_is_outside_the_fp32_band(self):
        outcome = self.run_invar("parity", REFERENCE / "qwen3", "numerics.precision=bf16")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertEqual(outcome.errors, [])
        for row in ("logits", "hidden states", "gradient mlp.up_proj", "loss of every step"):
            self.assertRegex(outcome.stdout, rf"(?m)^{row} .* OUTSIDE$")

    def test_missing_folder(self):
        for ranks in (None, 2):
            self.fail_with(DATA, "nowhere/expected.safetensors", "No such file", arguments=["parity", "nowhere"],
                           ranks=ranks, hint=False)

    def test_broken_case(self):
        case = self.copy_case()
        for text, rule in (("{", "not valid JSON"), ("[]", "not a JSON object"),
                           ('{"batch": "four", "seq": 32, "steps": 10}', 'batch must be an integer, not "four"'),
                           ('{"batch": 0, "seq": 32, "steps": 10}', "batch must be an integer above 0"),
                           ('{"batch": 4, "seq": 32}', "steps must be an integer above 0")):
            (case / "case.json").write_text(text)
            self.fail_with(DATA, "case/case.json", rule, "make_reference.py", arguments=["parity", "case"])
        (case / "case.json").write_text('{"batch": 4, "seq": 32, "steps": 40}')
        for ranks in (None, 2):
            self.fail_with(DATA, "expected.safetensors", "of case.json was expected", arguments=["parity", "case"],
                           ranks=ranks)

    def edit_case(self, case, **changes):
        fields = json.loads((REFERENCE / "qwen3" / "case.json").read_text())
        (case / "case.json").write_text(json.dumps({**fields, **changes}))
        return fields["optimizer"]

    def test_optimizer_is_that_of_the_case(self):
        case = self.copy_case()
        optimizer = self.edit_case(case)
        for key, value in {"lr": 1e-3, "beta1": 0.8, "beta2": 0.999, "eps": 1e-3, "weight_decay": 1.0,
                           "clip_grad": 0}.items():
            with self.subTest(key):
                self.edit_case(case, optimizer={**optimizer, key: value})
                self.assertIn("loss of every step", self.outside(self.run_invar("parity", case)))

    def test_case_without_an_optimizer(self):
        case = self.copy_case()
        (case / "case.json").write_text('{"batch": 4, "seq": 32, "steps": 10, "seed": 11}')
        self.assertEqual(self.succeed("parity", case).stdout.replace(str(case), ""),
                         self.succeed("parity", REFERENCE / "qwen3").stdout.replace(str(REFERENCE / "qwen3"), ""))

    def test_broken_optimizer(self):
        case = self.copy_case()
        good = self.edit_case(case)
        missing = {key: value for key, value in good.items() if key != "eps"}
        for optimizer, expected in ((missing, "optimizer.eps must be a number above 0"),
                                    ({**good, "eps": 0}, "optimizer.eps must be a number above 0"),
                                    ({**good, "lr": "3e-4"}, "optimizer.lr must be a number"),
                                    ({**good, "beta2": 1}, "optimizer.beta2 must be a number of at least 0 and below 1"),
                                    ({**good, "clip_grad": -1}, "optimizer.clip_grad must be a number of at least 0"),
                                    ({**good, "momentum": 0.9}, "unknown key optimizer.momentum"),
                                    (None, "optimizer must be an object"), ([3e-4], "optimizer must be an object")):
            with self.subTest(optimizer=optimizer):
                self.edit_case(case, optimizer=optimizer)
                self.fail_with(DATA, "case/case.json", expected, "make_reference.py", arguments=["parity", "case"])

    def test_token_outside_the_vocabulary(self):
        at = 2 * 4 * 33 + 3 * 33 + 32  # the last label of step 2, sample 3
        for bad in (VOCABULARY, -1, (1 << 32) + 5):
            case = self.copy_case()
            tamper(case / "expected.safetensors", "tokens",
                   lambda data: data[:8 * at] + struct.pack("<q", bad) + data[8 * at + 8:])
            for ranks in (None, 2):
                with self.subTest(bad, ranks=ranks):
                    self.fail_with(DATA, "case/expected.safetensors", f"step 2, sample 3, position 32 has id {bad},",
                                   f"[0, {VOCABULARY})", arguments=["parity", "case"], ranks=ranks)

    def test_batch_that_the_ranks_do_not_divide(self):
        self.fail_with(USAGE, "train.global_batch_size = 16 is not a multiple of", "1 · 3 = 3",
                       arguments=["parity", REFERENCE / "qwen3_batch16"], ranks=3)

    def test_overrides_that_the_case_fixes(self):
        case = REFERENCE / "qwen3"
        for override in ("train.steps=3", "optimizer.lr=1", "model.hidden_size=64", "data.kind=mock"):
            self.fail_with(USAGE, f"argument {override}: the case fixes", arguments=["parity", case, override])
        self.fail_with(USAGE, "--matrix varies", arguments=["parity", case, "--matrix", "parallel.tensor=2"])
        self.fail_with(USAGE, "--matrix", arguments=["parity", case, "--matrix", "--thread-ranks", "2"])
        for threads in (["--matrix"], ["--thread-ranks", "2"]):
            self.fail_with(USAGE, "argument comm.timeout=9: ranks are threads",
                           arguments=["parity", case, *threads, "comm.timeout=9"])
        self.fail_with(USAGE, "one process", arguments=["parity", case, "--thread-ranks", "2"], ranks=2)
        self.fail_with(USAGE, "numerics.workers = 8 exceeds train.global_batch_size = 4",
                       arguments=["parity", case, "numerics.reduction=invariant"])


class Tokenise(JobTest):
    """tools/tokenise writes what invar trains on: the text of this repository, byte by byte."""

    INPUTS = [REFERENCE / "README.md", ROOT / "launch" / "README.md"]

    def tokenise(self, form):
        output = self.folder / f"{form}.bin"
        done = subprocess.run([sys.executable, ROOT / "tools" / "tokenise", *self.INPUTS, "--output", output, "--format",
                               form], capture_output=True, text=True, timeout=invar_job.RUN_SECONDS)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_the_keys_it_prints_are_a_config(self):
        for form in ("llmc", "flat", "megatron"):
            with self.subTest(form):
                keys = self.tokenise(form).split("For the config:\n")[1]
                rest = {name: section for name, section in SMALL.items() if name != "model"}
                model = ", ".join(f"{key}: {value}" for key, value in SMALL["model"].items() if key != "vocab_size")
                config = self.write("printed.yaml", to_yaml(rest) + keys.replace("model: {", f"model: {{{model}, "))
                self.succeed("train", config, "train.steps=1")

    def train_on(self, form, vocabulary=257, **data):
        config = self.config(model={"vocab_size": vocabulary}, data={"path": f"{form}.bin", **data},
                             train={"steps": 12, "sequence_length": 32, "global_batch_size": 8},
                             optimizer={"lr": 1e-2}, parallel={"tensor": 2})
        losses = self.train(form, config=config, ranks=2)
        self.assertLess(sum(losses[-3:]) / 3, losses[0] - 1, losses)  # text is easy to begin with
        return losses

    def test_flat_and_llmc_hold_the_same_tokens(self):
        count = sum(path.stat().st_size + 1 for path in self.INPUTS)  # with the end of each document
        self.assertIn(f"{count} tokens in 2 documents, vocabulary 257, end-of-document 256", self.tokenise("llmc"))
        self.tokenise("flat")
        llmc = self.train_on("llmc", kind="tokens")
        self.assertEqual(self.train_on("flat", kind="tokens", token_dtype="uint16"), llmc)
        self.succeed("train", "run.yaml", "data.token_dtype=''", "train.steps=1", ranks=2)  # flat.bin.json says it
        (self.folder / "flat.bin.json").unlink()
        self.fail_with(USAGE, "data.token_dtype is missing", "flat.bin",
                       arguments=["train", "run.yaml", "data.token_dtype=''"], ranks=2)

    def test_megatron(self):
        self.tokenise("megatron")
        self.train_on("megatron", kind="megatron", path="megatron", split='"100, 0, 0"')
        self.assertIn("in 2 documents", (self.folder / "megatron" / "log.txt").read_text())

    def test_the_end_of_a_document_needs_its_id(self):
        self.tokenise("llmc")
        config = self.config(model={"vocab_size": 256}, data={"kind": "tokens", "path": "llmc.bin"},
                             train={"steps": 100, "sequence_length": 32, "global_batch_size": 8})
        self.fail_with(DATA, "llmc.bin.json", "a vocabulary of 257, but model.vocab_size is 256",
                       arguments=["train", config])
        (self.folder / "llmc.bin.json").unlink()
        self.fail_with(DATA, "llmc.bin", "has id 256, outside the vocabulary [0, 256)", arguments=["train", config])


class Launch(JobTest):
    """launch/mpirun: what stands before the config is mpirun's."""

    def launch(self, *arguments, **environment):
        return subprocess.run([ROOT / "launch" / "mpirun", *arguments], cwd=self.folder, capture_output=True, text=True,
                              env={**invar_job.ENVIRONMENT, "INVAR": invar_job.INVAR, **environment},
                              timeout=invar_job.RUN_SECONDS)

    def test_trains(self):
        done = self.launch("-n", "2", self.config(), "train.steps=1", "parallel.tensor=2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 ranks: tensor 2 x data 1", done.stdout)
        self.assertIn("step 1/1 | loss", done.stdout)

    def test_mistakes(self):
        done = self.launch("-n", "2", self.config(), "train.stepz=1")
        self.assertEqual((done.returncode, done.stderr.count("invar: error:")), (USAGE, 1), done.stderr)
        done = self.launch("-n", "2")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("usage: launch/mpirun", done.stderr)
        done = self.launch("-n", "2", self.config(), INVAR="/nowhere/invar")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("/nowhere/invar is not built", done.stderr)


if __name__ == "__main__":
    unittest.main()
