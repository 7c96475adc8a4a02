#include "config/config_changes.h"

#include <algorithm>
#include <array>

#include "config/contract.h"
#include "config/key_table.h"
#include "config/refuse.h"

namespace invar {
namespace {

enum class Effect : uint8_t { kNone, kRecipe, kModel };

Effect effect_of(const Key& key) {
  constexpr std::array kSilent = {
      "model.preset",
      "model.hf_path",
      "model.init",
      "model.initializer_range",
      "numerics.leaves",  // the contract has them
      "numerics.workers",
      "train.micro_batch_size",
      "train.recompute",
      "train.eval_every",
      "train.eval_batches",
      "train.exit_after_steps",
      "train.exit_after_minutes",
      "train.on_nonfinite",
      "train.spike_zscore",
      "data.cache_dir",
  };
  const std::string name = key.full_name();
  if (std::find(kSilent.begin(), kSilent.end(), name) != kSilent.end()) return Effect::kNone;
  constexpr std::array kRecipe = {"model.max_position_embeddings", "numerics.reduction",
                                  "numerics.tensor_reduce_dtype"};
  if (std::find(kRecipe.begin(), kRecipe.end(), name) != kRecipe.end()) return Effect::kRecipe;
  if (key.section == "model" || key.section == "numerics") return Effect::kModel;
  const bool is_recipe =
      key.section == "train" || key.section == "optimizer" || key.section == "schedule" || key.section == "data";
  return is_recipe ? Effect::kRecipe : Effect::kNone;
}

// To the contract of before.
std::string way_back(const ContractDifference& difference, const Config& saved, const Config& now) {
  const std::string& field = difference.field;
  if (find_key("numerics", field) != nullptr) return format("set numerics.{}: {}", field, difference.saved);
  if (field == "token_block" || field == "head_chunk_tokens") {
    return format("set train.sequence_length: {}", saved.train.sequence_length);
  }
  if (field == "arithmetic") return format("run on devices whose matrix products are {}", difference.saved);
  if (field == "attention" && saved.train.sequence_length != now.train.sequence_length) {
    return format("set train.sequence_length: {}", saved.train.sequence_length);
  }
  if (field == "attention" && saved.data.reset_at_eod != now.data.reset_at_eod) {
    return format("set data.reset_at_eod: {}", saved.data.reset_at_eod);
  }
  if (field == "attention") return format("run on devices whose attention is {}", difference.saved);
  return "use the invar that saved it";
}

}  // namespace

std::vector<ConfigChange> config_changes(const Config& saved, const Config& now) {
  std::vector<ConfigChange> changes;
  for (const Key& key : key_table()) {
    const Effect effect = effect_of(key);
    if (effect == Effect::kNone) continue;
    const ConfigChange change{key.full_name(), print(key, saved), print(key, now)};
    if (change.before == change.after) continue;
    if (effect == Effect::kModel) {
      refuse(now, {change.key},
             format("{} is {}, but the checkpoint was saved with {}", change.key, change.after, change.before),
             format("use {}: {}, or start anew with checkpoint.resume: never and another checkpoint.dir", change.key,
                    change.before));
    }
    changes.push_back(change);
  }
  return changes;
}

void check_contract(const Config& saved, std::string_view saved_contract, const Config& now,
                    std::string_view contract) {
  if (saved_contract.empty() || contract.empty()) return;
  std::optional<ContractDifference> difference = first_difference(saved_contract, contract);
  if (!difference) return;
  if (difference->field == "tensor_reduce_dtype") {  // not named if it is fp32
    for (std::string* value : {&difference->saved, &difference->now}) {
      if (*value == "none") *value = "fp32";
    }
  }
  refuse(now, {"numerics." + difference->field, "numerics.reduction"},
         format("{} of the numerics contract is {}, but the checkpoint was saved with {}", difference->field,
                difference->now, difference->saved),
         format("{}, or start from the weights alone: invar export, invar import, checkpoint.resume",
                way_back(*difference, saved, now)));
}

}  // namespace invar
