#include "config/contract.h"

#include <algorithm>

#include "config/field.h"
#include "config/layer_kinds.h"
#include "config/units.h"
#include "core/format.h"
#include "core/philox.h"

namespace invar {
namespace {

// The next "key value" line, cut off the text.
std::pair<std::string, std::string> next_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  const size_t blank = std::min(line.find(' '), line.size());
  return {std::string(line.substr(0, blank)), std::string(line.substr(std::min(line.size(), blank + 1)))};
}

}  // namespace

int64_t SumSite::runs(int64_t wanted) const {
  return head_runs(parts, units, wanted);
}

int64_t SumSite::leaves(int64_t wanted) const {
  return std::min(wanted, units) * runs(wanted);
}

std::vector<SumSite> sum_sites(const ModelConfig& model) {
  const auto heads = [&](const char* name, const char* key, int64_t kv_heads) {
    return SumSite{name, key, kv_heads, false, model.num_attention_heads / kv_heads};
  };
  std::vector<SumSite> sites = {heads("key and value heads", "model.num_key_value_heads", model.num_key_value_heads)};
  if (model.num_global_key_value_heads > 0) {
    sites.push_back(heads("key and value heads of full layers", "model.num_global_key_value_heads",
                          model.num_global_key_value_heads));
  }
  sites.push_back({"FFN blocks", "model.intermediate_size", ffn_blocks(model.intermediate_size), false});
  if (const int64_t last = layer_intermediate_size(model, model.num_hidden_layers - 1);
      last != model.intermediate_size) {
    sites.push_back({"FFN blocks of sharing layers", "model.intermediate_size", ffn_blocks(last), false});
  }
  if (model.hidden_size_per_layer_input > 0) {
    sites.push_back({"blocks of the per-layer inputs", "model.hidden_size_per_layer_input",
                     per_layer_blocks(model.hidden_size_per_layer_input), false});
  }
  sites.push_back({"vocabulary units", "model.vocab_size", vocab_units(model.vocab_size), true});
  return sites;
}

std::string NumericsContract::text() const {
  std::string lines = format("version {}\nprecision {}\narithmetic {}\n", version, word_of(precision), arithmetic);
  if (!attention.empty()) lines += format("attention {}\n", attention);
  lines += format("leaves {}\nworkers {}\ntoken_block {}\nhead_chunk_tokens {}\n", leaves, workers, token_block,
                  head_chunk_tokens);
  if (head_runs != 1) lines += format("head_runs {}\n", head_runs);
  if (tensor_reduce_dtype != Precision::kF32) lines += format("tensor_reduce_dtype {}\n", word_of(tensor_reduce_dtype));
  return lines;
}

std::string NumericsContract::hash() const {
  return format("{:016x}", hash_name(text()));
}

std::string NumericsContract::describe() const {
  std::string line = hash() + ":";
  const std::string fields = text();
  for (std::string_view rest = fields; !rest.empty();) {
    const auto [key, value] = next_line(rest);
    line += format(" {} {}{}", key, value, rest.empty() ? "" : ",");
  }
  return line;
}

std::string arithmetic_of(Precision precision, std::string_view architecture) {
  if (architecture.empty()) return "fma-chain";
  return format("{}-{}", precision == Precision::kF32 ? "fma-chain" : "mma-k16", architecture);
}

NumericsContract numerics_contract(const Config& config, std::string arithmetic, std::string attention) {
  NumericsContract contract;
  contract.precision = config.numerics.precision;
  contract.arithmetic = std::move(arithmetic);
  contract.attention = std::move(attention);
  contract.tensor_reduce_dtype = config.numerics.tensor_reduce_dtype;
  contract.leaves = config.numerics.leaves;
  contract.workers = config.numerics.workers;
  contract.token_block = token_block_of(config.train.sequence_length);
  contract.head_chunk_tokens = head_chunk_tokens_of(config.train.sequence_length, config.model.vocab_size);
  for (const SumSite& site : sum_sites(config.model)) {
    contract.head_runs = std::max(contract.head_runs, site.runs(contract.leaves));
  }
  return contract;
}

int64_t token_block_of(int64_t sequence_length) {
  return ceil_div(sequence_length, kTokenBlocks);
}

int64_t head_chunk_tokens_of(int64_t sequence_length, int64_t vocab_size) {
  int64_t tokens = std::min(sequence_length, kHeadChunkElements / padded_vocab_size(vocab_size));
  while (tokens > 1 && sequence_length % tokens != 0) --tokens;
  return std::max<int64_t>(tokens, 1);
}

Range workers_within(Range samples, int64_t workers, int64_t batch) {
  return {ceil_div(samples.begin * workers, batch), ceil_div(samples.end * workers, batch)};
}

Range workers_of(int64_t data_rank, int64_t data, int64_t workers, int64_t batch) {
  return workers_within({first_sample(data_rank, data, batch), first_sample(data_rank + 1, data, batch)}, workers,
                        batch);
}

bool begins_with_workers(int64_t data, int64_t workers, int64_t batch) {
  for (int64_t rank = 0; rank < data; ++rank) {
    const int64_t worker = workers_of(rank, data, workers, batch).begin;
    if (first_sample(worker, workers, batch) != first_sample(rank, data, batch)) return false;
  }
  return true;
}

std::optional<ContractDifference> first_difference(std::string_view saved, std::string_view now) {
  while (!saved.empty() || !now.empty()) {
    const auto [saved_key, saved_value] = next_line(saved);
    const auto [now_key, now_value] = next_line(now);
    if (saved_key == now_key && saved_value == now_value) continue;
    if (saved_key == now_key) return ContractDifference{now_key, saved_value, now_value};
    if (now_key.empty()) return ContractDifference{saved_key, saved_value, "none"};
    return ContractDifference{now_key, "none", now_value};
  }
  return std::nullopt;
}

}  // namespace invar
