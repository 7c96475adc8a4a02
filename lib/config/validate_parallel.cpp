#include "config/validate_parallel.h"

#include <algorithm>
#include <array>
#include <set>

#include "config/contract.h"
#include "config/failed_slots.h"
#include "config/refuse.h"
#include "config/resolved.h"
#include "config/suggest.h"
#include "config/units.h"
#include "config/validation.h"
#include "core/integer.h"

namespace invar {
namespace {

struct Misfit {
  std::string key;   // the model's side of the rule
  std::string rule;  // worded to follow "parallel.tensor = 4 "
};

// Key and value heads of one kind of layer, which stay whole or are replicated.
Misfit key_value_misfit(const char* key, int64_t kv_heads, int64_t tensor) {
  if (tensor <= kv_heads && kv_heads % tensor != 0) {
    return {key, format("does not divide {} key and value heads", kv_heads)};
  }
  // Beyond the KV heads, each is replicated over tensor / kv_heads ranks, which share its query heads equally: the
  // degree divides all query heads.
  if (tensor > kv_heads && tensor % kv_heads != 0) {
    return {key, format("is no multiple of {} key and value heads", kv_heads)};
  }
  return {};
}

Misfit head_misfit(const ModelConfig& model, int64_t tensor, bool uneven) {
  const int64_t query_heads = model.num_attention_heads;
  if (uneven) {
    if (tensor <= query_heads) return {};
    return {"model.num_attention_heads", format("exceeds {} query heads", query_heads)};
  }
  if (query_heads % tensor != 0) {
    return {"model.num_attention_heads", format("does not divide {} query heads", query_heads)};
  }
  Misfit misfit = key_value_misfit("model.num_key_value_heads", model.num_key_value_heads, tensor);
  if (misfit.key.empty() && model.num_global_key_value_heads > 0) {
    misfit = key_value_misfit("model.num_global_key_value_heads", model.num_global_key_value_heads, tensor);
  }
  return misfit;
}

Misfit mlp_misfit(int64_t intermediate_size, int64_t tensor, bool uneven) {
  const int64_t blocks = ffn_blocks(intermediate_size);
  if (uneven ? tensor <= blocks : blocks % tensor == 0) return {};
  return {"model.intermediate_size", format("{} {} FFN blocks of {} columns", uneven ? "exceeds" : "does not divide",
                                            blocks, ffn_block_width(intermediate_size))};
}

Misfit per_layer_input_misfit(const ModelConfig& model, int64_t tensor, bool uneven) {
  const int64_t width = model.hidden_size_per_layer_input;
  if (width == 0) return {};
  const int64_t blocks = per_layer_blocks(width);
  if (uneven ? tensor <= blocks : blocks % tensor == 0) return {};
  return {"model.hidden_size_per_layer_input",
          format("{} {} blocks of {} columns of the per-layer inputs", uneven ? "exceeds" : "does not divide", blocks,
                 per_layer_block_width(width))};
}

// Whether ranks can hold equal shares of units in whole leaves.
bool share_equally(int64_t units, int64_t leaves, int64_t ranks) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (run_begin(units, leaves, run_begin(leaves, ranks, rank)) * ranks != rank * units) return false;
  }
  return true;
}

Misfit site_misfit(const SumSite& site, int64_t numerics_leaves, int64_t tensor, bool uneven) {
  if (tensor > site.units * site.parts) {
    if (site.parts > 1) return {"model.num_attention_heads", format("exceeds {} query heads", site.units * site.parts)};
    return {site.key, format("exceeds {} {}, of which a rank holds whole ones with numerics.reduction: invariant",
                             site.units, site.name)};
  }
  const int64_t leaves = site.leaves(numerics_leaves);
  if (tensor > leaves) return {"numerics.leaves", format("exceeds {} leaves, which ranks hold whole", leaves)};
  if (uneven || site.may_be_uneven) return {};
  if (tensor <= site.units) {
    const int64_t whole = std::min(numerics_leaves, site.units);
    if (share_equally(site.units, whole, tensor)) return {};
    return {site.key, format("does not divide {} leaves of {} {} equally", whole, site.units, site.name)};
  }
  if (tensor % site.units != 0) return {site.key, format("is no multiple of {} {}", site.units, site.name)};
  if (share_equally(site.parts, site.runs(numerics_leaves), tensor / site.units)) return {};
  return {"model.num_attention_heads",
          format("does not divide {} leaves of {} query heads equally", leaves, site.units * site.parts)};
}

// With invariant numerics ranks hold whole leaves.
Misfit leaf_misfit(const Config& config, int64_t tensor, bool uneven) {
  for (const SumSite& site : sum_sites(config.model)) {
    Misfit misfit = site_misfit(site, config.numerics.leaves, tensor, uneven);
    if (!misfit.key.empty()) return misfit;
  }
  return {};
}

// The first rule that a degree breaks; the key is empty if it fits.
Misfit tensor_misfit(const Config& config, int64_t tensor, bool uneven) {
  if (config.numerics.reduction == Reduction::kInvariant) return leaf_misfit(config, tensor, uneven);
  const ModelConfig& model = config.model;
  Misfit misfit = head_misfit(model, tensor, uneven);
  // An MLP of twice the width has as many blocks or twice as many: it fits wherever this one does.
  if (misfit.key.empty()) misfit = mlp_misfit(model.intermediate_size, tensor, uneven);
  if (misfit.key.empty()) misfit = per_layer_input_misfit(model, tensor, uneven);
  if (!misfit.key.empty()) return misfit;
  const int64_t vocabulary = vocab_units(model.vocab_size);
  if (tensor <= vocabulary) return {};
  return {"model.vocab_size", format("exceeds {} vocabulary units of {} rows", vocabulary, kVocabUnit)};
}

void check_tensor(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  const Misfit misfit = tensor_misfit(config, parallel.tensor, parallel.uneven);
  if (misfit.key.empty()) return;
  const std::vector<int> fitting = fitting_tensor_degrees(config, parallel.uneven);
  std::vector<int> here;
  std::copy_if(fitting.begin(), fitting.end(), std::back_inserter(here), [&](int t) { return world_size % t == 0; });
  std::string hint =
      parallel.uneven ? format("use at most {}", fitting.back()) : format("use {}", join_numbers(fitting));
  if (!parallel.uneven && here != fitting) hint += format(" (at {} ranks {})", world_size, join_numbers(here));
  Config fast = config;
  fast.numerics.reduction = Reduction::kFast;
  if (!parallel.uneven && tensor_misfit(config, parallel.tensor, true).key.empty()) {
    hint += ", or parallel.uneven: true";
  } else if (misfit.key == "numerics.leaves") {
    hint += format(", or numerics.leaves: {} (other bits)", parallel.tensor);
  } else if (tensor_misfit(fast, parallel.tensor, parallel.uneven).key.empty()) {
    hint += ", or numerics.reduction: fast";
  }
  refuse(config, {"parallel.tensor", misfit.key},
         format("parallel.tensor = {} {} ({})", parallel.tensor, misfit.rule, misfit.key), hint);
}

// world_size: without the spares.
void check_world(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t spare = parallel.spare;
  const std::string beside = spare > 0 ? format(" beside parallel.spare = {}", spare) : "";
  const int64_t shared = int64_t{parallel.tensor} * parallel.gtp;
  if (parallel.data == 0) {
    if (world_size % shared == 0) return;
    std::vector<int> degrees = fitting_tensor_degrees(config, parallel.uneven);
    std::erase_if(degrees, [&](int tensor) { return world_size % tensor != 0; });
    refuse(config, {"parallel.tensor", "parallel.data"},
           format("{} ranks{} cannot be cut into replicas of parallel.tensor · parallel.gtp = {} · {} = {} ranks",
                  world_size, beside, parallel.tensor, parallel.gtp, shared),
           format("start {}, {}, {} … ranks (mpirun -n {}), or set parallel.tensor to {}", shared + spare,
                  2 * shared + spare, 3 * shared + spare, (world_size / shared + 1) * shared + spare,
                  join_numbers(degrees)));
  }
  const int64_t needed = shared * parallel.data;
  if (needed == world_size) return;
  std::string hint = format("start {} ranks (mpirun -n {})", needed + spare, needed + spare);
  if (world_size % shared == 0) hint += format(", or set parallel.data: auto (here {})", world_size / shared);
  refuse(config, {"parallel.data", "parallel.tensor"},
         format("parallel.tensor · gtp · data = {} · {} · {} = {}, but the job has {} ranks{}", parallel.tensor,
                parallel.gtp, parallel.data, needed, world_size, beside),
         hint);
}

void check_batch(const Config& config, int world_size) {
  const int64_t micro = config.train.micro_batch_size;
  const int64_t data = reader_degree(config, world_size);
  const int64_t unit = micro * data;
  const int64_t batch = global_batch_size(config, world_size);
  if (batch % unit != 0) {
    const int64_t below = batch / unit * unit;
    const std::string near = below == 0 ? format("{}", unit) : format("{} or {}", below, below + unit);
    refuse(config, {"train.global_batch_size", "train.micro_batch_size"},
           format("train.global_batch_size = {} is not a multiple of train.micro_batch_size · data = {} · {} = {}",
                  batch, micro, data, unit),
           format("use {}, or another micro_batch_size", near));
  }
}

// Sequence parallelism over the tensor ranks of the widest replica, which with invariant numerics hold whole blocks of
// tokens.
void check_sequence(const Config& config, int tensor) {
  if (!config.parallel.sequence) return;
  const int64_t tokens = config.train.micro_batch_size * config.train.sequence_length;
  if (tokens < tensor) {
    refuse(config, {"parallel.sequence", "parallel.tensor"},
           format("parallel.sequence: true shares {} tokens of a micro-batch over {} tensor ranks", tokens, tensor),
           format("use parallel.sequence: false, or at least {} tokens", tensor));
  }
  const int64_t blocks = tokens / token_block_of(config.train.sequence_length);
  if (config.numerics.reduction == Reduction::kInvariant && blocks < tensor) {
    refuse(
        config, {"parallel.sequence", "parallel.tensor"},
        format("parallel.sequence: true shares {} token blocks of a micro-batch, which numerics.reduction: invariant "
               "keeps whole, over {} tensor ranks",
               blocks, tensor),
        "use parallel.sequence: false, or a larger train.micro_batch_size");
  }
}

// Samples and tokens of the run can be counted.
void check_counts(const Config& config, int64_t batch) {
  if (batch > kMostSamplesOfStep) {
    refuse(config, {"train.micro_batch_size", "parallel.data"},
           format("a step of {} samples (train.micro_batch_size · data) exceeds {}", batch, kMostSamplesOfStep),
           "use a smaller train.micro_batch_size");
  }
  const std::optional<int64_t> tokens =
      checked_product(std::array<int64_t, 3>{config.train.steps, batch, config.train.sequence_length});
  if (tokens.value_or(kMostTokensInAll + 1) <= kMostTokensInAll) return;
  refuse(config, {"train.steps", "train.global_batch_size", "train.sequence_length"},
         format("train.steps = {} of {} samples of {} tokens: more tokens than 2^62", config.train.steps, batch,
                config.train.sequence_length),
         "use fewer steps, or a smaller batch");
}

void check_worker_count(const Config& config, int64_t batch) {
  const int64_t workers = config.numerics.workers;
  if (config.numerics.reduction == Reduction::kFast || workers <= batch) return;
  refuse(config, {"numerics.workers", "train.global_batch_size"},
         format("numerics.workers = {} exceeds train.global_batch_size = {}", workers, batch),
         format("use at most {}, or a larger batch", batch));
}

// With invariant numerics data ranks hold whole workers.
void check_workers(const Config& config, int world_size) {
  if (config.numerics.reduction != Reduction::kInvariant) return;
  const int64_t workers = config.numerics.workers;
  const int64_t batch = global_batch_size(config, world_size);
  const int data = reader_degree(config, world_size);
  if (!begins_with_workers(data, workers, batch)) {
    std::string hint = "use parallel.data " + join_numbers(fitting_data_degrees(config, batch));
    if (data <= batch) hint += format(", or numerics.workers: {} (other bits)", data);
    refuse(config, {"parallel.data", "numerics.workers"},
           format("parallel.data = {}: its ranks hold {} of {} samples each, not whole workers (numerics.workers = {})",
                  data, batch / data, batch, workers),
           hint);
  }
}

// The grid tensor · data, once it is whole: without failures, or with spares in their places.
void check_grid(const Config& config, int ranks) {
  check_counts(config, global_batch_size(config, ranks));
  check_batch(config, ranks);
  check_sequence(config, config.parallel.tensor);
  check_worker_count(config, global_batch_size(config, ranks));
  check_workers(config, ranks);
}

// Replicas are cut as with parallel.uneven: true, each by its own width.
void check_widths(const Config& config, const ReplicaPlan& plan) {
  for (const int width : std::set<int>(plan.widths.begin(), plan.widths.end())) {
    const Misfit misfit = tensor_misfit(config, width, true);
    if (misfit.key.empty()) continue;
    refuse(config, {"parallel.nonuniform.tensor_widths", "parallel.nonuniform.failed", misfit.key},
           format("a replica of {} tensor ranks {} ({})", width, misfit.rule, misfit.key),
           format("use at most {} tensor ranks", fitting_tensor_degrees(config, true).back()));
  }
}

void check_nonuniform(const Config& config, int launched, std::span<const HostSlot> hosts) {
  const ParallelConfig& parallel = config.parallel;
  check_count(config, "parallel.nonuniform.min_tensor", parallel.nonuniform.min_tensor, 1, parallel.tensor);
  if (!parallel.nonuniform.tensor_widths.empty()) {
    refuse_if_set(config, "parallel.nonuniform.min_tensor", "with parallel.nonuniform.tensor_widths");
  }
  if (parallel.nonuniform.reshare && config.checkpoint.every == 0) {
    refuse(
        config, {"parallel.nonuniform.reshare", "checkpoint.every"},
        "parallel.nonuniform.reshare: true shares the batch anew at a checkpoint, but checkpoint.every = 0 saves none "
        "on the way",
        "set checkpoint.every, or parallel.nonuniform.reshare: false");
  }
  const ReplicaPlan plan = plan_replicas(config, launched, hosts);
  if (is_whole_grid(config, plan)) {
    check_tensor(config, plan.training_ranks());
    check_grid(config, plan.training_ranks());
    return;
  }
  check_widths(config, plan);
  check_counts(config, plan.batch());
  check_sequence(config, *std::max_element(plan.widths.begin(), plan.widths.end()));
  check_worker_count(config, plan.batch());
}

void check_uniform(const Config& config, int launched) {
  check_tp_base(config);
  refuse_if_set(config, "parallel.nonuniform.non_active_ranks_per_dp", "with parallel.nonuniform.tp_spares: 0");
  for (const std::string_view key : {"min_tensor", "batch", "speeds", "reshare"}) {
    refuse_if_set(config, format("parallel.nonuniform.{}", key), "without failed or tensor_widths beside it");
  }
  const int ranks = launched - config.parallel.spare;
  if (ranks < 1) {
    refuse(config, {"parallel.spare"},
           format("parallel.spare = {} leaves none of {} ranks to train", config.parallel.spare, launched),
           "start more ranks, or lower parallel.spare");
  }
  check_tensor(config, ranks);
  check_world(config, ranks);
  check_grid(config, ranks);
}

}  // namespace

std::vector<int> fitting_tensor_degrees(const Config& config, bool uneven) {
  std::vector<int> degrees;
  for (int tensor = 1; tensor <= config.model.num_attention_heads; ++tensor) {
    if (tensor_misfit(config, tensor, uneven).key.empty()) degrees.push_back(tensor);
  }
  return degrees;
}

std::vector<int> fitting_data_degrees(const Config& config, int64_t batch) {
  const int64_t micro_batches = batch / config.train.micro_batch_size;
  std::vector<int> degrees;
  for (int data = 1; data <= micro_batches; ++data) {
    const bool equal = batch % (config.train.micro_batch_size * data) == 0;
    if (equal &&
        (config.numerics.reduction == Reduction::kFast || begins_with_workers(data, config.numerics.workers, batch))) {
      degrees.push_back(data);
    }
  }
  return degrees;
}

void validate_parallel(const Config& config, int launched, std::span<const HostSlot> hosts) {
  const ParallelConfig& parallel = config.parallel;
  check_count(config, "parallel.tensor", parallel.tensor, 1);
  check_count(config, "parallel.data", parallel.data, 0);
  check_count(config, "parallel.gtp", parallel.gtp, 1);
  check_count(config, "parallel.bucket_size", parallel.bucket_size, 1);
  check_count(config, "parallel.spare", parallel.spare, 0);
  if (parallel.gtp != 1) {
    refuse(config, {"parallel.gtp"},
           format("parallel.gtp = {}: generalised tensor parallelism is not available yet", parallel.gtp),
           "set parallel.gtp: 1");
  }
  if (has_nonuniform(config)) {
    check_nonuniform(config, launched, hosts);
  } else {
    check_uniform(config, launched);
  }
}

}  // namespace invar
