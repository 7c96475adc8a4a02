#!/usr/bin/env python3
"""Makes a parity case: a small model, and what it must compute, by Hugging Face transformers in float64 on the CPU.

    tools/make_reference.py qwen3 --out runs/cases/mine                     # one of the presets below
    tools/make_reference.py my/config.json --batch 2 --seq 64 --out DIR     # any dense Qwen3 or Gemma 4, random weights
    tools/make_reference.py my_model/ --weights my_model/ --out DIR         # a Hugging Face folder and its own weights
    tools/make_reference.py --check tests/reference/qwen3                   # recompute a case and compare it

then `invar parity DIR`. tests/reference/README.md says what the files of a case hold.
Needs: pip install torch transformers safetensors numpy
"""

import argparse
import json
import pathlib
import sys

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    sys.exit(f"make_reference: {error}\n  fix: pip install torch transformers safetensors numpy")

QWEN3 = {"model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 8, "rms_norm_eps": 1e-6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "initializer_range": 0.02,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA4 = {"model_type": "gemma4_text", "vocab_size": 250, "vocab_size_per_layer_input": 250, "hidden_size": 48,
          "num_attention_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
          "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                              "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                                 "partial_rotary_factor": 0.25}},
          "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1,
          "bos_token_id": 2, "enable_moe_block": False, "num_experts": None, "top_k_experts": None,
          "moe_intermediate_size": None}
S, F = "sliding_attention", "full_attention"
PRESETS = {
    "qwen3": QWEN3 | {"vocab_size": 250, "intermediate_size": 96, "num_hidden_layers": 4, "num_key_value_heads": 4,
                      "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_untied": QWEN3 | {"vocab_size": 256, "intermediate_size": 80, "num_hidden_layers": 3,
                             "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
    "qwen3_batch16": QWEN3 | {"vocab_size": 250, "intermediate_size": 96, "num_hidden_layers": 2,
                              "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    "gemma4_batch16": GEMMA4 | {"intermediate_size": 64, "num_hidden_layers": 6, "num_key_value_heads": 1,
                                "layer_types": [S, S, F, S, S, F], "global_head_dim": 32, "sliding_window": 5,
                                "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
                                "hidden_size_per_layer_input": 16},
}

# Of AdamW and the clipping, by the names of invar's config. clip_grad 0: no clipping.
OPTIMIZER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 1.0}


# model_type: configuration, model
FAMILIES = {"qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
            "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM)}


class InFloat64(TorchFunctionMode):
    """Model code casts to float32 by name (norms, softmax, RoPE, loss): every such cast becomes one to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


class RefuseFloat32(TorchDispatchMode):
    """Proves that InFloat64 missed nothing: an operation with a float32 result is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                raise RuntimeError(f"{func} computed in float32: the reference would not be a float64 one")
        return result


def read_config(source):
    if source in PRESETS:
        fields = PRESETS[source]
    else:
        path = pathlib.Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise SystemExit(f"make_reference: {source} is neither a preset ({', '.join(PRESETS)}) nor a config.json")
        fields = json.loads(path.read_text())
    dropped = ("architectures", "transformers_version", "torch_dtype", "dtype")
    given = {key: value for key, value in fields.items() if key not in dropped}
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise SystemExit(f"make_reference: model_type is {family!r}; supported: {', '.join(FAMILIES)}")
    config = FAMILIES[family][0](**given)
    if config.attention_bias or config.attention_dropout or getattr(config, "use_sliding_window", False):
        raise SystemExit("make_reference: use_sliding_window, attention_bias and attention_dropout must be off")
    if getattr(config, "enable_moe_block", False):
        raise SystemExit("make_reference: mixture of experts is not supported")
    return config


def model_class(config):
    return FAMILIES[config.model_type][1]


def read_weights(source):
    path = pathlib.Path(source)
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise SystemExit(f"make_reference: no model*.safetensors at {source}")
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def random_weights(model, seed):
    """Larger than a training run's: every part of the model must show in the logits and in the gradients."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if parameter.dim() == 1 else 0.6 * parameter.shape[1] ** -0.5 * noise
    for name in sorted(layer_scalars(model)):
        weights[name] = 0.5 + torch.rand(1, generator=generator)
    return weights


def layer_scalars(model):
    """Gemma 4's factor of each layer: in the files, but a buffer, which is not trained."""
    return {name: value for name, value in model.named_buffers() if name.endswith("layer_scalar")}


def build(config, weights, dtype):
    model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # a tensor of another shape
        raise SystemExit(f"make_reference: {error}") from None
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise SystemExit(f"make_reference: the weights do not fit the config: missing {missing}, not known {unexpected}")
    return model.to(dtype)  # inv_freq too: its float32 value, held in float64


def mean_cross_entropy(model, tokens):
    """tokens (B, S+1) -> logits (B, S, V) and the mean over all B·S labels."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run_steps(model, tokens, settings):
    """The whole case for one precision: what step 0 computes, then one AdamW update per row of tokens (N, B, S+1)."""
    result = {}
    hooks = [layer.register_forward_hook(lambda _, __, output, n=n: result.update({f"hidden.{n}": output.detach()}))
             for n, layer in enumerate(model.model.layers)]
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": settings["weight_decay"]},
                                   {"params": others, "weight_decay": 0.0}], lr=settings["lr"], eps=settings["eps"],
                                  betas=(settings["beta1"], settings["beta2"]), foreach=False)
    losses, norms = [], []
    for step, batch in enumerate(tokens):
        optimizer.zero_grad(set_to_none=True)
        logits, loss = mean_cross_entropy(model, batch)
        loss.backward()
        if step == 0:
            result |= {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
            result |= {f"grad.{name}": p.grad.clone() for name, p in parameters.items()}
            for hook in hooks:
                hook.remove()
        norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt()
        losses.append(loss.detach())
        norms.append(norm)
        if settings["clip_grad"] > 0:
            for p in parameters.values():
                p.grad *= torch.clamp(settings["clip_grad"] / (norm + 1e-6), max=1.0)
        optimizer.step()
    return result | {"traj_loss": torch.stack(losses), "traj_grad_norm": torch.stack(norms)}


def compute(config, weights, tokens, settings):
    wide = build(config, weights, torch.float64)
    with RefuseFloat32(), InFloat64():
        expected = run_steps(wide, tokens, settings)
    narrow = run_steps(build(config, weights, torch.float32), tokens, settings)

    def distance(names):
        return max((narrow[name].double() - expected[name]).abs().max().item() for name in names)

    gradients = [name for name in expected if name.startswith("grad.")]
    hidden = [name for name in expected if name.startswith("hidden.")]
    noise = torch.tensor([distance(names) for names in (["logits"], gradients, ["traj_loss"], ["traj_grad_norm"], hidden)])
    return {"tokens": tokens, "fp32_noise": noise} | {name: value.float() for name, value in expected.items()}


def write_case(folder, config, weights, expected, case):
    folder.mkdir(parents=True, exist_ok=True)
    build(config, weights, torch.float32).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    metadata = {"torch": torch.__version__, "transformers": transformers.__version__}
    save_file({name: value.contiguous() for name, value in expected.items()}, folder / "expected.safetensors", metadata)
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them private
    print(f"wrote {folder}: loss {expected['loss'].item():.6f}, fp32 noise (logits, gradients, losses, norms, hidden) "
          + ", ".join(f"{value:.1e}" for value in expected["fp32_noise"].tolist()))


def check_case(folder, tolerance=1e-6):
    """Compares a case with a fresh computation: relative to the largest entry of each tensor, or absolute below 1."""
    stored = load_file(folder / "expected.safetensors")
    settings = json.loads((folder / "case.json").read_text()).get("optimizer", OPTIMIZER)
    fresh = compute(read_config(folder), read_weights(folder), stored["tokens"], settings)
    if fresh.keys() != stored.keys():
        raise SystemExit(f"make_reference: other tensors: {sorted(fresh.keys() ^ stored.keys())}")
    worst = {}
    for name in stored.keys() - {"tokens", "fp32_noise"}:
        kind = name.split(".")[0]
        difference = (stored[name].double() - fresh[name].double()).abs().max().item()
        worst[kind] = max(worst.get(kind, 0.0), difference / max(1.0, stored[name].abs().max().item()))
    for kind, value in sorted(worst.items()):
        print(f"{kind:16}{value:10.1e}  {'ok' if value <= tolerance else 'DIFFERS'}")
    print(f"{'fp32_noise':16}stored {stored['fp32_noise'].tolist()}, here {fresh['fp32_noise'].tolist()}")
    return 0 if max(worst.values()) <= tolerance else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help=f"preset ({', '.join(PRESETS)}), config.json or Hugging Face folder")
    parser.add_argument("--out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default 4)")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sequence (default 32)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--seed", type=int, default=11, help="of the weights and the tokens (default 11)")
    for name, value in OPTIMIZER.items():
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=value, help=f"(default {value})")
    parser.add_argument("--weights", help="safetensors file or folder to start from, instead of random weights")
    parser.add_argument("--tokens-from", type=pathlib.Path, metavar="CASE",
                        help="take the tokens of this case, instead of random ones")
    parser.add_argument("--check", type=pathlib.Path, metavar="CASE", help="recompute this case and compare")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if arguments.check:
        return check_case(arguments.check)
    if not arguments.config or not arguments.out:
        parser.error("give a config and --out DIR, or --check CASE")
    if min(arguments.batch, arguments.seq, arguments.steps) < 1:
        parser.error("--batch, --seq and --steps must be at least 1")

    config = read_config(arguments.config)
    if arguments.weights:
        weights = read_weights(arguments.weights)
    else:
        weights = random_weights(model_class(config)(config), arguments.seed)
    if arguments.tokens_from:
        tokens = load_file(arguments.tokens_from / "expected.safetensors")["tokens"]
    else:
        shape = (arguments.steps, arguments.batch, arguments.seq + 1)
        tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(arguments.seed + 1))
    steps, batch, length = tokens.shape
    settings = {name: getattr(arguments, name) for name in OPTIMIZER}
    case = {"batch": batch, "seq": length - 1, "steps": steps, "seed": arguments.seed, "optimizer": settings}
    write_case(arguments.out, config, weights, compute(config, weights, tokens, settings), case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
