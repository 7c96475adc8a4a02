"""Hugging Face transformers on weights that invar trained and exported. Skipped where Python has no transformers."""
import importlib.util
import unittest

import test_runs


@unittest.skipUnless(all(map(importlib.util.find_spec, ("torch", "transformers", "safetensors"))),
                     "Python has no torch, transformers and safetensors")
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


if __name__ == "__main__":
    unittest.main()
