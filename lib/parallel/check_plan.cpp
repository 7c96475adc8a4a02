#include "parallel/check_plan.h"

#include <algorithm>
#include <array>

#include "config/key_table.h"
#include "core/error.h"
#include "core/philox.h"
#include "parallel/first_difference.h"

namespace invar {
namespace {

// Paths may differ from host to host, but all ranks have one or none has.
constexpr std::array<std::string_view, 6> kPaths = {
    "model.hf_path", "data.path", "data.cache_dir", "checkpoint.dir", "checkpoint.export_dir", "log.dir"};

// A preset is in the values of the model's other keys, who is lost in the plan; how to wait is each rank's own.
bool is_common(const Key& key) {
  return key.section != "parallel.nonuniform" && key.section != "comm" && key.full_name() != "model.preset";
}

// Without the paths, which are only counted.
std::string weights_of(const Blend& blend) {
  std::string weights = format("{} sources", blend.paths.size());
  for (const double weight : blend.weights) weights += format(" {}", weight);
  return weights;
}

// What all ranks must have in common of a key's value.
std::string common_value(const Key& key, const Config& config) {
  const std::string name = key.full_name();
  if (name == "data.blend") return weights_of(config.data.blend);
  std::string value = print(key, config);
  const bool may_be_a_path = name == "checkpoint.resume" && value != "auto" && value != "never";
  if (may_be_a_path || (std::ranges::find(kPaths, name) != kPaths.end() && value != R"("")")) return "a path";
  return value;
}

std::vector<const Key*> common_keys() {
  std::vector<const Key*> keys;
  for (const Key& key : key_table()) {
    if (is_common(key)) keys.push_back(&key);
  }
  return keys;
}

}  // namespace

void check_plan(const Config& config, const ReplicaPlan& plan, Communicator& world) {
  if (const auto found = first_difference({plan.hash()}, world)) {
    throw Error(ErrorKind::kConfig,
                format("rank {} plans other replicas than rank {}", world.job_rank(found->rank), world.job_rank(0)),
                "give every rank the same config, with the same parallel.nonuniform");
  }
  const std::vector<const Key*> keys = common_keys();
  std::vector<uint64_t> values;
  for (const Key* key : keys) values.push_back(hash_name(common_value(*key, config)));
  if (const auto found = first_difference(values, world)) {
    const Key& key = *keys[static_cast<size_t>(found->index)];
    throw Error(
        ErrorKind::kConfig,
        format("rank {} has another {} than rank {}", world.job_rank(found->rank), key.full_name(), world.job_rank(0)),
        format("give every rank the same config; here {} = {}", key.full_name(), print(key, config)));
  }
}

}  // namespace invar
