#include "parallel/check_plan.h"

#include "config/key_table.h"
#include "core/error.h"
#include "core/philox.h"

namespace invar {
namespace {

// Where the model came from may differ, and who is lost is the plan's.
bool is_common(const Key& key) {
  if (key.section == "model") return key.name != "preset" && key.name != "hf_path";
  return key.section == "parallel" || key.section == "numerics" || key.section == "train";
}

uint64_t hash_of(const Config& config) {
  std::string text;
  for (const Key& key : key_table()) {
    if (is_common(key)) text += format("{}: {}\n", key.full_name(), print(key, config));
  }
  return hash_name(text);
}

void check_equal(uint64_t hash, std::string_view differs, const std::string& hint, Communicator& world) {
  const auto own = static_cast<int64_t>(hash);
  const int64_t first = all_reduce_value(world, world.rank() == 0 ? own : 0, ReduceOp::kSum);
  const int64_t rank = all_reduce_value(world, int64_t{own == first ? world.size() : world.rank()}, ReduceOp::kMin);
  if (rank != world.size()) throw Error(ErrorKind::kConfig, format("rank {} {} rank 0", rank, differs), hint);
}

}  // namespace

void check_plan(const Config& config, const ReplicaPlan& plan, Communicator& world) {
  check_equal(plan.hash(), "plans other replicas than",
              "give every rank the same config, with the same parallel.nonuniform", world);
  check_equal(hash_of(config), "has another model, parallel, numerics or train section of the config than",
              "give every rank the same config", world);
}

}  // namespace invar
