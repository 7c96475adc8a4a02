#pragma once

#include <string>
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
// numerics. Returned are changes of the training recipe, which are allowed, for people to see. Where the run lies and
// how it is laid out (parallel, micro-batches, recomputation, device, logs, checkpoints) does not matter.
std::vector<ConfigChange> config_changes(const Config& saved, const Config& now);

}  // namespace invar
