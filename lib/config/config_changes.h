#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace invar {

// How the config of a resumed run differs from the one it was saved with.
struct ConfigChange {
  std::string key;  // "optimizer.lr"
  std::string before;
  std::string after;
};

// Error{kConfig} for a change that would make another model or other arithmetic of it: the model's fields and
// numerics.precision. Returned are changes of the training recipe, which are allowed, for people to see. Where the run
// lies and how it is laid out (parallel, micro-batches, recomputation, device, logs, checkpoints) does not matter.
std::vector<ConfigChange> config_changes(const Config& saved, const Config& now);

// The other half, for invariant numerics: texts of contracts (config/contract.h), empty with fast ones. Error{kConfig}
// if both runs have one and they differ. From fast to invariant, or back, may be changed.
void check_contract(const Config& saved, std::string_view saved_contract, const Config& now, std::string_view contract);

}  // namespace invar
