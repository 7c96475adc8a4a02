"""invar against Hugging Face transformers at work: on weights that invar exported, and for a parity case of one's own.
Skipped where Python has no transformers.
"""
import importlib.util
import json
import re
import subprocess
import sys
import unittest

import invar_job
import test_runs
from invar_job import REFERENCE, ROOT, SMALL, JobTest, to_yaml

needs_transformers = unittest.skipUnless(
    all(map(importlib.util.find_spec, ("torch", "transformers", "safetensors"))),
    "Python has no torch, transformers and safetensors")


@needs_transformers
class OwnCase(JobTest):
    """tools/make_reference.py for a model and an optimizer of the user's own."""

    def make(self, *arguments, **model):
        config = json.loads((REFERENCE / "qwen3" / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps({**config, **model}))
        done = subprocess.run([sys.executable, "-B", ROOT / "tools" / "make_reference.py", "config.json", "--out", "case",
                               *map(str, arguments)], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_matrix_leaves_out_what_does_not_fit(self):
        self.make("--batch", 6, "--seq", 8, "--steps", 2, num_attention_heads=4, num_key_value_heads=2,
                  num_hidden_layers=1, layer_types=["full_attention"])
        lines = self.succeed("parity", "case", "--matrix").stdout.splitlines()
        layouts = [line for line in lines if line.startswith("tensor ")]
        self.assertEqual(lines[-1], f"{len(layouts)} layouts, 0 outside the band")
        self.assertEqual({re.match(r"tensor (\d)", line)[1] for line in layouts}, {"1", "2", "3", "4"})
        self.assertIn("left out   8: tensor 8: this model can be cut into at most 4 parts", lines)
        self.assertEqual(sum(int(line.split()[2][:-1]) for line in lines if line.startswith("left out "))
                         + len(layouts), 76)

    def test_optimizer(self):
        own = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.3, "clip_grad": 0}
        self.make("--batch", 2, "--seq", 8, "--steps", 5,
                  *[text for key, value in own.items() for text in ("--" + key.replace("_", "-"), value)])
        self.assertEqual(json.loads((self.folder / "case" / "case.json").read_text())["optimizer"], own)
        self.succeed("parity", "case")


@needs_transformers
class Transformers(test_runs.ExportedRun):
    def test_loss_of_the_exported_weights(self):
        import torch
        import transformers

        losses = self.export("fp32")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "hf", output_loading_info=True)
        self.assertFalse(report["missing_keys"])
        self.assertFalse(report["unexpected_keys"])
        self.assertEqual(model.dtype, torch.float32)
        tokens = torch.tensor([self.sample])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item()
        self.assertAlmostEqual(loss, losses[-1], delta=1e-5)


@unittest.skipUnless(importlib.util.find_spec("h5py"), "Python has no h5py")
@needs_transformers
class CheckExport(JobTest):
    """tools/check_export on checkpoints of trained models."""

    def test_logits(self):
        for case, precision in (("qwen3", "bf16"), ("gemma4_e4b", "fp32")):
            with self.subTest(case):
                fields = {**SMALL, "model": {"hf_path": REFERENCE / case, "init": "hf"}, "optimizer": {"lr": 1e-3},
                          "numerics": {"precision": precision}, "parallel": {"tensor": 2, "sequence": "true"}}
                self.succeed("train", self.write("run.yaml", to_yaml(fields)), f"log.dir={case}", "checkpoint.every=3",
                             ranks=2)
                done = subprocess.run([sys.executable, "-B", ROOT / "tools" / "check_export", case, "--invar",
                                       invar_job.INVAR], cwd=self.folder, capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertRegex(done.stdout, rf"{case}: \d+ logits up to .* invar differs by .*: ok")


class TransformersGemma4(Transformers):
    """The same for a Gemma 4 with all that its small sizes have."""

    def periodic(self, **sections):
        fields = {**SMALL, "model": {"hf_path": REFERENCE / "gemma4_batch16", "init": "hf"}, **sections,
                  "train": {**SMALL["train"], **sections["train"]},
                  "data": {"kind": "tokens", "path": "periodic.bin", "token_dtype": "uint16"}}
        return self.write("run.yaml", to_yaml(fields))


if __name__ == "__main__":
    unittest.main()
