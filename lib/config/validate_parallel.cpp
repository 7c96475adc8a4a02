#include "config/validate_parallel.h"

#include <algorithm>

#include "config/refuse.h"
#include "config/resolved.h"
#include "config/suggest.h"
#include "config/units.h"
#include "config/validation.h"

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

// The first rule that a degree breaks; the key is empty if it fits.
Misfit tensor_misfit(const ModelConfig& model, int64_t tensor, bool uneven) {
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
  const Misfit misfit = tensor_misfit(config.model, parallel.tensor, parallel.uneven);
  if (misfit.key.empty()) return;
  const std::vector<int> fitting = fitting_tensor_degrees(config.model, parallel.uneven);
  std::vector<int> here;
  std::copy_if(fitting.begin(), fitting.end(), std::back_inserter(here), [&](int t) { return world_size % t == 0; });
  std::string hint =
      parallel.uneven ? format("use at most {}", fitting.back()) : format("use {}", join_numbers(fitting));
  if (!parallel.uneven && here != fitting) hint += format(" (at {} ranks {})", world_size, join_numbers(here));
  if (!parallel.uneven && tensor_misfit(config.model, parallel.tensor, true).key.empty()) {
    hint += ", or parallel.uneven: true";
  }
  refuse(config, {"parallel.tensor", misfit.key},
         format("parallel.tensor = {} {} ({})", parallel.tensor, misfit.rule, misfit.key), hint);
}

void check_world(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t shared = int64_t{parallel.tensor} * parallel.gtp;
  if (parallel.data == 0) {
    if (world_size % shared == 0) return;
    std::vector<int> degrees = fitting_tensor_degrees(config.model, parallel.uneven);
    std::erase_if(degrees, [&](int tensor) { return world_size % tensor != 0; });
    refuse(config, {"parallel.tensor", "parallel.data"},
           format("{} ranks cannot be cut into replicas of parallel.tensor · parallel.gtp = {} · {} = {} ranks",
                  world_size, parallel.tensor, parallel.gtp, shared),
           format("start {}, {}, {} … ranks (mpirun -n {}), or set parallel.tensor to {}", shared, 2 * shared,
                  3 * shared, (world_size / shared + 1) * shared, join_numbers(degrees)));
  }
  const int64_t needed = shared * parallel.data;
  if (needed == world_size) return;
  std::string hint = format("start {} ranks (mpirun -n {})", needed, needed);
  if (world_size % shared == 0) hint += format(", or set parallel.data: auto (here {})", world_size / shared);
  refuse(config, {"parallel.data", "parallel.tensor"},
         format("parallel.tensor · gtp · data = {} · {} · {} = {}, but the job has {} ranks", parallel.tensor,
                parallel.gtp, parallel.data, needed, world_size),
         hint);
}

void check_batch(const Config& config, int world_size) {
  const int64_t micro = config.train.micro_batch_size;
  const int64_t data = data_degree(config, world_size);
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
  const int64_t tokens = micro * config.train.sequence_length;
  if (config.parallel.sequence && tokens < config.parallel.tensor) {
    refuse(config, {"parallel.sequence", "parallel.tensor"},
           format("parallel.sequence: true shares {} tokens of a micro-batch over parallel.tensor = {} ranks", tokens,
                  config.parallel.tensor),
           format("use parallel.sequence: false, or at least {} tokens", config.parallel.tensor));
  }
}

}  // namespace

std::vector<int> fitting_tensor_degrees(const ModelConfig& model, bool uneven) {
  std::vector<int> degrees;
  for (int tensor = 1; tensor <= model.num_attention_heads; ++tensor) {
    if (tensor_misfit(model, tensor, uneven).key.empty()) degrees.push_back(tensor);
  }
  return degrees;
}

void validate_parallel(const Config& config, int world_size) {
  const ParallelConfig& parallel = config.parallel;
  check_count(config, "parallel.tensor", parallel.tensor, 1);
  check_count(config, "parallel.data", parallel.data, 0);
  check_count(config, "parallel.gtp", parallel.gtp, 1);
  check_count(config, "parallel.bucket_size", parallel.bucket_size, 1);
  if (parallel.gtp != 1) {
    refuse(config, {"parallel.gtp"},
           format("parallel.gtp = {}: generalised tensor parallelism is not available yet", parallel.gtp),
           "set parallel.gtp: 1");
  }
  check_tensor(config, world_size);
  check_world(config, world_size);
  check_batch(config, world_size);
}

}  // namespace invar
