#include "config/key_table.h"

#include <algorithm>

#include "core/format.h"

namespace invar {
namespace {

template <auto... Members>
Field at(Config& config) {
  return &(config.*....*Members);
}

using C = Config;
using M = ModelConfig;
using P = ParallelConfig;
using N = NonuniformConfig;
using T = TrainConfig;
using O = OptimizerConfig;
using S = ScheduleConfig;
using D = DataConfig;

constexpr auto kAuto = Default::kAuto;
constexpr auto kRequired = Default::kRequired;

constexpr Key kKeys[] = {
    {"model", "family", at<&C::model, &M::family>, "architecture: qwen3 or gemma4; preset and hf_path set it"},
    {"model", "preset", at<&C::model, &M::preset>,
     "a named model, such as qwen3-0.6b or gemma4-e4b; fields given beside it win"},
    {"model", "hf_path", at<&C::model, &M::hf_path>,
     "a Hugging Face folder; its config.json sets the fields below; fields given beside it win"},
    {"model", "init", at<&C::model, &M::init>, "initial weights: drawn from train.seed, or read from hf_path"},
    {"model", "vocab_size", at<&C::model, &M::vocab_size>,
     "token ids 0 to vocab_size − 1, the end-of-document id included", kRequired},
    {"model", "hidden_size", at<&C::model, &M::hidden_size>, "width of the residual stream", kRequired},
    {"model", "intermediate_size", at<&C::model, &M::intermediate_size>, "width of the gated MLP", kRequired},
    {"model", "num_hidden_layers", at<&C::model, &M::num_hidden_layers>, "transformer layers", kRequired},
    {"model", "num_attention_heads", at<&C::model, &M::num_attention_heads>, "query heads", kRequired},
    {"model", "num_key_value_heads", at<&C::model, &M::num_key_value_heads>,
     "key and value heads; divides the query heads", kRequired},
    {"model", "head_dim", at<&C::model, &M::head_dim>, "width of one head; even; not tied to hidden_size", kRequired},
    {"model", "max_position_embeddings", at<&C::model, &M::max_position_embeddings>,
     "longest sequence the model is meant for"},
    {"model", "rms_norm_eps", at<&C::model, &M::rms_norm_eps>, "added to the mean square in every norm"},
    {"model", "rope_theta", at<&C::model, &M::rope_theta>, "base of the rotary position frequencies"},
    {"model", "initializer_range", at<&C::model, &M::initializer_range>,
     "standard deviation of random initial weights"},
    {"model", "tie_word_embeddings", at<&C::model, &M::tie_word_embeddings>, "the output head is the embedding"},

    // Only of gemma4.
    {"model", "layer_types", at<&C::model, &M::layer_types>,
     "gemma4: s (sliding window) and f (full attention), repeated over the layers; empty: all full"},
    {"model", "sliding_window", at<&C::model, &M::sliding_window>,
     "gemma4: keys that a query of a sliding layer sees, its own included"},
    {"model", "sliding_rope_theta", at<&C::model, &M::sliding_rope_theta>, "gemma4: rope_theta of the sliding layers"},
    {"model", "global_head_dim", at<&C::model, &M::global_head_dim>,
     "gemma4: head_dim of the full layers; 0: as the sliding ones"},
    {"model", "num_global_key_value_heads", at<&C::model, &M::num_global_key_value_heads>,
     "gemma4: key and value heads of the full layers, with attention_k_eq_v; 0: as the sliding ones"},
    {"model", "partial_rotary_factor", at<&C::model, &M::partial_rotary_factor>,
     "gemma4: part of a full layer's head that rotary positions turn"},
    {"model", "attention_k_eq_v", at<&C::model, &M::attention_k_eq_v>,
     "gemma4: full layers take their values from the keys"},
    {"model", "num_kv_shared_layers", at<&C::model, &M::num_kv_shared_layers>,
     "gemma4: last layers, which use the keys and values of an earlier one"},
    {"model", "use_double_wide_mlp", at<&C::model, &M::use_double_wide_mlp>,
     "gemma4: the MLP of the num_kv_shared_layers is twice as wide"},
    {"model", "hidden_size_per_layer_input", at<&C::model, &M::hidden_size_per_layer_input>,
     "gemma4: width of each layer's own token embeddings; 0: none"},
    {"model", "final_logit_softcapping", at<&C::model, &M::final_logit_softcapping>,
     "gemma4: c of logits = c · tanh(logits / c); 0: none"},

    {"parallel", "tensor", at<&C::parallel, &P::tensor>, "tensor-parallel ranks that share one copy of the weights"},
    {"parallel", "sequence", at<&C::parallel, &P::sequence>,
     "sequence parallelism: the tensor ranks share the tokens outside attention and MLP"},
    {"parallel", "data", at<&C::parallel, &P::data>, "data-parallel replicas; auto: world / (tensor · gtp)", kAuto},
    {"parallel", "gtp", at<&C::parallel, &P::gtp>, "generalised tensor parallelism; only 1 so far"},
    {"parallel", "uneven", at<&C::parallel, &P::uneven>,
     "tensor ranks may hold unequal runs of heads, FFN blocks and vocabulary"},
    {"parallel", "bucket_size", at<&C::parallel, &P::bucket_size>,
     "gradients of a tensor rank that are summed over the data ranks at once, beside the backward pass"},
    {"parallel", "spare", at<&C::parallel, &P::spare>,
     "ranks launched beyond tensor · data, idle until they step in for failed ones"},

    {"parallel.nonuniform", "failed", at<&C::parallel, &P::nonuniform, &N::failed>,
     "slots of the grid tensor · data that are lost, dp0.tp5, or launched ranks that must not be used, node03.gpu2: by "
     "host and local rank, the number of its GPU where each has one; their replicas go on with fewer tensor ranks"},
    {"parallel.nonuniform", "tensor_widths", at<&C::parallel, &P::nonuniform, &N::tensor_widths>,
     "instead of failed: the tensor ranks of each replica, at most parallel.tensor"},
    {"parallel.nonuniform", "min_tensor", at<&C::parallel, &P::nonuniform, &N::min_tensor>,
     "live ranks below which a replica is left out; its ranks idle"},
    {"parallel.nonuniform", "batch", at<&C::parallel, &P::nonuniform, &N::batch>,
     "keep: the replicas share the global batch by their speeds; shrink: a slower replica takes less, the others no "
     "more, and the batch gets smaller"},
    {"parallel.nonuniform", "speeds", at<&C::parallel, &P::nonuniform, &N::speeds>,
     "measured micro-batches per second of each replica, relative; empty: modelled by the units of its widest rank"},
    {"parallel.nonuniform", "reshare", at<&C::parallel, &P::nonuniform, &N::reshare>,
     "go on from a checkpoint that was just saved with the speeds that the run has measured, if they save a tenth of "
     "the step"},
    {"parallel.nonuniform", "tp_base", at<&C::parallel, &P::nonuniform, &N::tp_base>,
     "with the three below instead of failed, as in Megatron-LM: parallel.tensor", kAuto},
    {"parallel.nonuniform", "tp_spares", at<&C::parallel, &P::nonuniform, &N::tp_spares>,
     "slots that a reduced replica lacks, at most: the last ones, where non_active_ranks_per_dp names no others; 0: "
     "off"},
    {"parallel.nonuniform", "num_reduced_tp_dp_ranks", at<&C::parallel, &P::nonuniform, &N::num_reduced_tp_dp_ranks>,
     "reduced replicas, the first ones"},
    {"parallel.nonuniform", "non_active_ranks_per_dp", at<&C::parallel, &P::nonuniform, &N::non_active_ranks_per_dp>,
     "slots that reduced replicas lack, by replica: {0: [2, 5]}, or by dp,cp,pp with cp and pp 0"},

    {"numerics", "precision", at<&C::numerics, &NumericsConfig::precision>,
     "weights and activations; masters, gradients and sums are fp32 in both"},
    {"numerics", "reduction", at<&C::numerics, &NumericsConfig::reduction>,
     "sums that ranks share: fast adds as ranks and libraries happen to; invariant by a fixed tree, with the same bits "
     "at every layout"},
    {"numerics", "tensor_reduce_dtype", at<&C::numerics, &NumericsConfig::tensor_reduce_dtype>,
     "what terms of sums of activations and their gradients over a tensor-parallel group travel in; bf16 halves the "
     "bytes, at a rounding. fast: of terms and partial sums, of no effect without tensor parallelism; invariant: of "
     "leaves at every layout, though they travel so only where leaves = parallel.tensor"},
    {"numerics", "leaves", at<&C::numerics, &NumericsConfig::leaves>,
     "invariant: parts of a sum over heads, FFN or vocabulary, added by the tree; at least parallel.tensor"},
    {"numerics", "workers", at<&C::numerics, &NumericsConfig::workers>,
     "invariant: parts of the global batch, added by the tree; a multiple of parallel.data"},

    {"", "device", [](Config& c) -> Field { return &c.device; },
     "where ranks compute; auto: CUDA if built with it and found"},

    {"train", "steps", at<&C::train, &T::steps>, "optimizer steps", kRequired},
    {"train", "sequence_length", at<&C::train, &T::sequence_length>, "tokens per sample", kRequired},
    {"train", "micro_batch_size", at<&C::train, &T::micro_batch_size>,
     "samples per forward and backward on one replica"},
    {"train", "global_batch_size", at<&C::train, &T::global_batch_size>,
     "samples per optimizer step; auto: micro_batch_size · data", kAuto},
    {"train", "seed", at<&C::train, &T::seed>, "of the initial weights and the data order"},
    {"train", "recompute", at<&C::train, &T::recompute>,
     "full: keep only layer inputs, compute the layers again in backward; selective: norms, RoPE and the gathers of "
     "sequence parallelism again, cheap for their memory; none: only products of gates, and under sequence parallelism "
     "each rank keeps layers' inputs of all tokens"},
    {"train", "eval_every", at<&C::train, &T::eval_every>, "steps between evaluations; 0: never"},
    {"train", "eval_batches", at<&C::train, &T::eval_batches>,
     "global batches per evaluation, at most: each sample of the validation split is read once"},
    {"train", "exit_after_minutes", at<&C::train, &T::exit_after_minutes>,
     "save and end with exit code 75 once this run has lasted so long; 0: never"},
    {"train", "exit_after_steps", at<&C::train, &T::exit_after_steps>,
     "save and end with exit code 75 after this many steps of this run; the schedule is that of train.steps; 0: never"},
    {"train", "on_nonfinite", at<&C::train, &T::on_nonfinite>,
     "a step whose loss or gradient is NaN or infinite: leave it out, or end the run; the weights are untouched"},
    {"train", "spike_zscore", at<&C::train, &T::spike_zscore>,
     "report a loss this many standard deviations above the mean of the last hundred; 0: never"},

    {"optimizer", "lr", at<&C::optimizer, &O::lr>, "peak learning rate of AdamW"},
    {"optimizer", "beta1", at<&C::optimizer, &O::beta1>, "decay of the first moment"},
    {"optimizer", "beta2", at<&C::optimizer, &O::beta2>, "decay of the second moment"},
    {"optimizer", "eps", at<&C::optimizer, &O::eps>, "added outside the square root"},
    {"optimizer", "weight_decay", at<&C::optimizer, &O::weight_decay>,
     "decoupled; only on tensors of two or more dims"},
    {"optimizer", "clip_grad", at<&C::optimizer, &O::clip_grad>, "largest global gradient norm; 0: no clipping"},

    {"schedule", "kind", at<&C::schedule, &S::kind>, "learning rate after the warm-up"},
    {"schedule", "warmup_steps", at<&C::schedule, &S::warmup_steps>, "linear rise from 0 to lr"},
    {"schedule", "decay_steps", at<&C::schedule, &S::decay_steps>,
     "finished steps at which min_lr is reached, the warm-up included; auto: train.steps, one past the last step",
     kAuto},
    {"schedule", "wsd_decay_steps", at<&C::schedule, &S::wsd_decay_steps>, "wsd: length of the decay at the end"},
    {"schedule", "min_lr", at<&C::schedule, &S::min_lr>, "learning rate from the end of the decay on"},

    {"data", "kind", at<&C::data, &D::kind>,
     "mock: random tokens; tokens: one flat .bin file; megatron: .bin and .idx"},
    {"data", "path", at<&C::data, &D::path>, "tokens: the .bin file; megatron: the path without .bin and .idx"},
    {"data", "blend", at<&C::data, &D::blend>,
     "instead of path: weights and paths of several sources, \"0.7 a 0.3 b\" or [[0.7, a], [0.3, \"my b\"]]; paths "
     "alone weigh by their size"},
    {"data", "cache_dir", at<&C::data, &D::cache_dir>,
     "megatron: where the order of samples is kept once built, for all ranks and later runs; empty: in memory"},
    {"data", "token_dtype", at<&C::data, &D::token_dtype>,
     "tokens of a file without a known header or FILE.bin.json: uint16 or uint32"},
    {"data", "eod_id", at<&C::data, &D::eod_id>,
     "end-of-document token; auto: as FILE.bin.json beside the tokens says, else the preset or model.hf_path", kAuto},
    {"data", "eod_mask_loss", at<&C::data, &D::eod_mask_loss>,
     "positions whose input ends a document do not count in the loss"},
    {"data", "reset_at_eod", at<&C::data, &D::reset_at_eod>,
     "attention and positions start anew after each end of document"},
    {"data", "validation_fraction", at<&C::data, &D::validation_fraction>,
     "tokens: tail of the data kept for evaluation"},
    {"data", "mock_vocab_size", at<&C::data, &D::mock_vocab_size>,
     "mock: tokens are drawn from the first of the vocabulary, so many; 0: from all"},
    {"data", "split", at<&C::data, &D::split>, "megatron: weights of training, validation and test"},

    {"checkpoint", "dir", at<&C::checkpoint, &CheckpointConfig::dir>,
     "folder of the checkpoints; empty: log.dir/checkpoints if checkpoint.every is set, else none are saved"},
    {"checkpoint", "every", at<&C::checkpoint, &CheckpointConfig::every>,
     "steps between checkpoints; 0: only at the end, and when a signal or train.exit_after_* ends the run"},
    {"checkpoint", "keep", at<&C::checkpoint, &CheckpointConfig::keep>, "checkpoints kept, the newest ones"},
    {"checkpoint", "keep_every", at<&C::checkpoint, &CheckpointConfig::keep_every>,
     "checkpoints of steps that are multiples of this are kept for good; 0: none"},
    {"checkpoint", "async", at<&C::checkpoint, &CheckpointConfig::async>,
     "copy to host memory and write in a thread while training goes on"},
    {"checkpoint", "on_error", at<&C::checkpoint, &CheckpointConfig::on_error>,
     "when a checkpoint cannot be written: go on training, or end the run"},
    {"checkpoint", "resume", at<&C::checkpoint, &CheckpointConfig::resume>,
     "auto: from the latest checkpoint in dir, if any; never: those in dir move into dir/earlier.1; or the path of a "
     "checkpoint or of a folder of them"},
    {"checkpoint", "export_dir", at<&C::checkpoint, &CheckpointConfig::export_dir>,
     "Hugging Face folder written at the end of training"},

    {"comm", "timeout", at<&C::comm, &CommConfig::timeout>,
     "seconds a collective may take before the ranks that wait say where they are, and who does not come, and the job "
     "ends; a rank that reads or saves keeps the others waiting too"},
    {"comm", "synchronous", at<&C::comm, &CommConfig::synchronous>,
     "wait for every collective between GPUs: for debugging; the bits are the same"},
    {"comm", "share_gpus", at<&C::comm, &CommConfig::share_gpus>,
     "a host's ranks may be more than its GPUs, which they take in turn: for trying layouts. NCCL then moves "
     "everything "
     "as between hosts, slowly; in invariant numerics the bits are the same"},

    {"log", "dir", at<&C::log, &LogConfig::dir>,
     "run folder: resolved config, metrics.jsonl, log.txt; one run at a time. A run that begins anew there keeps what "
     "an "
     "earlier one wrote: metrics.1.jsonl and so on"},
    {"log", "every", at<&C::log, &LogConfig::every>, "steps between console lines"},
    {"log", "dump_step", at<&C::log, &LogConfig::dump_step>,
     "step whose activations and gradients go to dir/dump_step_N.h5, for invar compare; kept in host memory until its "
     "end; 0: never"},
    {"log", "profile_step", at<&C::log, &LogConfig::profile_step>,
     "step between cudaProfilerStart and cudaProfilerStop, for ncu --profile-from-start off or nsys "
     "--capture-range=cudaProfilerApi; 0: never"},
    {"log", "hash_every", at<&C::log, &LogConfig::hash_every>,
     "steps between hashes of the state (weights, moments, gradients), the same at every layout, for invar compare; "
     "copies on several ranks are compared too, as every step has read them, and a difference ends the run. 0: never; "
     "then copies are compared before a save alone, as they are at that time"},
    {"log", "hash_blocks", at<&C::log, &LogConfig::hash_blocks>,
     "the hashes of every block of 4096 elements go to dir/hash_step_N.h5, 8 bytes each"},
};

// Field of the config and the same field of the defaults, as pointers of one type.
template <typename Visitor>
auto visit_with_default(const Key& key, Config& config, Visitor visitor) {
  Config defaults;
  const Field initial = key.field(defaults);
  return std::visit([&](auto* member) { return visitor(*member, *std::get<decltype(member)>(initial)); },
                    key.field(config));
}

std::string default_text(const Key& key) {
  switch (key.when_absent) {
    case Default::kRequired:
      return "–";
    case Default::kAuto:
      return "`auto`";
    case Default::kValue:
      return format("`{}`", print(key, Config{}));
  }
  return "";
}

}  // namespace

std::string Key::full_name() const {
  return section.empty() ? std::string(name) : format("{}.{}", section, name);
}

std::span<const Key> key_table() {
  return kKeys;
}

std::vector<std::string_view> section_names() {
  std::vector<std::string_view> names;
  for (const Key& key : kKeys) {
    if (!key.section.empty() && std::find(names.begin(), names.end(), key.section) == names.end()) {
      names.push_back(key.section);
    }
  }
  return names;
}

std::vector<std::string_view> key_names(std::string_view section) {
  std::vector<std::string_view> names;
  for (const Key& key : kKeys) {
    if (key.section == section) names.push_back(key.name);
  }
  return names;
}

const Key* find_key(std::string_view section, std::string_view name) {
  for (const Key& key : kKeys) {
    if (key.section == section && key.name == name) return &key;
  }
  return nullptr;
}

const Key* find_key(std::string_view full_name) {
  const size_t dot = full_name.rfind('.');
  if (dot == std::string_view::npos) return find_key("", full_name);
  return dot == 0 ? nullptr : find_key(full_name.substr(0, dot), full_name.substr(dot + 1));
}

std::optional<Refusal> assign(const Key& key, Config& config, const Value& value) {
  if (key.when_absent != Default::kAuto) return assign(key.field(config), value);
  if (value.text == "auto") {
    visit_with_default(key, config, [](auto& member, const auto& initial) { member = initial; });
    return std::nullopt;
  }
  if (std::optional<Refusal> refusal = assign(key.field(config), value)) {
    refusal->fix += ", or auto";
    return refusal;
  }
  if (has_default(key, config)) return Refusal{format("cannot be {}", value.text), "write auto"};
  return std::nullopt;
}

std::string print(const Key& key, const Config& config) {
  if (key.when_absent == Default::kAuto && has_default(key, config)) return "auto";
  Config copy = config;
  return print(key.field(copy));
}

bool has_default(const Key& key, const Config& config) {
  Config copy = config;
  return visit_with_default(key, copy, [](const auto& member, const auto& initial) { return member == initial; });
}

std::string describe_keys() {
  std::string text;
  std::string_view section = "none yet";
  for (const Key& key : kKeys) {
    if (key.section != section) {
      section = key.section;
      text += text.empty() ? "" : "\n";
      text += section.empty() ? "**top level**\n\n" : format("**{}**\n\n", section);
      text += "| key | type | default | meaning |\n|---|---|---|---|\n";
    }
    Config config;
    std::string type;
    for (char c : type_name(key.field(config))) type += c == '|' ? std::string("\\|") : std::string(1, c);
    if (key.when_absent == Default::kAuto) type += " or auto";
    text += format("| `{}` | {} | {} | {} |\n", key.name, type, default_text(key), key.help);
  }
  return text;
}

std::string to_yaml(const Config& config) {
  std::string text;
  std::string_view section;
  for (const Key& key : kKeys) {
    const size_t dot = key.section.find('.');  // of a section in another one
    const std::string indent = dot == std::string_view::npos ? "" : "  ";
    if (key.section != section && !key.section.empty()) {
      text += format("{}{}:\n", indent, dot == std::string_view::npos ? key.section : key.section.substr(dot + 1));
    }
    section = key.section;
    text += format("{}{}{}: {}\n", indent, section.empty() ? "" : "  ", key.name, print(key, config));
  }
  return text;
}

std::string to_portable_yaml(const Config& config) {
  Config portable = config;
  portable.model.preset.clear();
  portable.model.hf_path.clear();
  portable.model.init = InitKind::kRandom;
  return to_yaml(portable);
}

}  // namespace invar
