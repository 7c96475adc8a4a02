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
                               *map(str, arguments)], cwd=self.folder, capture_output=True, text=True,
                              timeout=invar_job.RUN_SECONDS)
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
                                       invar_job.INVAR], cwd=self.folder, capture_output=True, text=True,
                                      timeout=invar_job.RUN_SECONDS)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertRegex(done.stdout, rf"{case}: \d+ logits up to .* invar differs by .*: ok")


GEMMA4_TEXT = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
               "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
               "sliding_window": 8, "max_position_embeddings": 128, "pad_token_id": 0,
               "layer_types": ["sliding_attention", "full_attention"] * 2}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 2}
QWEN3_TEXT = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}

# Every class of transformers whose text model is a dense Qwen3 or Gemma 4, small: its name, the config, and what is left out.
TOWERS = {
    "gemma4": ("Gemma4", "gemma4_text", {
        "text_config": {**GEMMA4_TEXT, **PER_LAYER_INPUTS},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16,
                          "pooling_kernel_size": 1},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
                         "subsampling_conv_channels": [8, 8]}}, "132 tensors of audio and 29 tensors of vision"),
    "gemma4 without audio": ("Gemma4", "gemma4_text", {
        "text_config": {**GEMMA4_TEXT, **PER_LAYER_INPUTS},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16,
                          "pooling_kernel_size": 1, "standardize": True}}, r"\d+ tensors of vision"),
    "gemma4_unified": ("Gemma4Unified", "gemma4_text", {
        "text_config": GEMMA4_TEXT,
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16,
                          "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 24}}, "1 tensors of audio and 10 tensors of vision"),
    "qwen3_vl": ("Qwen3VL", "qwen3", {
        "text_config": {**QWEN3_TEXT, "rope_parameters": MROPE}, "tie_word_embeddings": False,
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
                          "out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
        "45 tensors of vision"),
    "qwen3_asr": ("Qwen3ASR", "qwen3", {
        "text_config": {**QWEN3_TEXT, "model_type": "qwen3",
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "audio_config": {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
                         "output_dim": 48, "downsample_hidden_size": 8, "num_mel_bins": 16}}, "45 tensors of audio"),
}


@unittest.skipUnless(importlib.util.find_spec("h5py"), "Python has no h5py")
@needs_transformers
class Towers(JobTest):
    """Models of several modalities, as save_pretrained writes them: the text model is trained and given back."""

    def save(self, name, config, **options):
        import torch
        import transformers

        torch.manual_seed(1)
        kind = getattr(transformers, name + "ForConditionalGeneration")
        kind(getattr(transformers, name + "Config")(**config)).save_pretrained(self.folder / "model", **options)
        return kind.from_pretrained(self.folder / "model", dtype=torch.float64)  # the scale of embeddings is of the dtype

    def logits(self, model):
        import torch

        with torch.no_grad():
            return model(torch.arange(2 * 16).view(2, 16) * 7 % 256, use_cache=False).logits

    def test_text_model_is_trained_and_exported(self):
        import safetensors.torch
        import torch
        import transformers

        for case, (name, text_type, config, left_out) in TOWERS.items():
            with self.subTest(case):
                self.setUp()  # a folder of its own
                model = self.save(name, config, **({"max_shard_size": "100KB"} if case == "qwen3_vl" else {}))
                self.assertRegex(self.succeed("import", "model", "imported").stdout, f"left out {left_out}\n")
                self.succeed("export", "imported", "text")
                text = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "text", dtype=torch.float64)
                self.assertEqual(text.config.model_type, text_type)
                self.assertLess((self.logits(text) - self.logits(model)).abs().max(), 1e-12)

                fields = {**SMALL, "model": {"hf_path": "model", "init": "hf"}, "optimizer": {"lr": 1e-2}}
                trained = self.succeed("train", self.write("run.yaml", to_yaml(fields)), "log.dir=run",
                                       "checkpoint.every=3", "checkpoint.export_dir=trained")
                self.assertRegex(trained.stdout, f"weights of model: left out {left_out}\n")
                done = subprocess.run([sys.executable, "-B", ROOT / "tools" / "check_export", "run", "--invar",
                                       invar_job.INVAR], cwd=self.folder, capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                # The trained text model takes its place in the model of several modalities.
                weights = safetensors.torch.load_file(self.folder / "trained" / "model.safetensors")
                weights = {key.replace("model.", "model.language_model.", 1): value for key, value in weights.items()}
                self.assertFalse(model.load_state_dict(weights, strict=False).unexpected_keys)
                text = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "trained", dtype=torch.float64)
                after = self.logits(text)
                self.assertLess((after - self.logits(model)).abs().max(), 1e-12)


class TransformersGemma4(Transformers):
    """The same for a Gemma 4 with all that its small sizes have."""

    def periodic(self, **sections):
        fields = {**SMALL, "model": {"hf_path": REFERENCE / "gemma4_batch16", "init": "hf"}, **sections,
                  "train": {**SMALL["train"], **sections["train"]},
                  "data": {"kind": "tokens", "path": "periodic.bin", "token_dtype": "uint16"}}
        return self.write("run.yaml", to_yaml(fields))


if __name__ == "__main__":
    unittest.main()
