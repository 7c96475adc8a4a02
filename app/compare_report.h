#pragma once

#include <string>
#include <vector>

#include "app/compare_hashes.h"
#include "app/compare_metrics.h"
#include "app/compare_tensors.h"

namespace invar::app {

// Lines for a person. Of gradients and weights only those outside and the ten nearest to their band (or beyond it) are
// listed, unless all are asked for.
std::vector<std::string> describe(const FileDifference& difference, bool all);
std::vector<std::string> describe(const MetricsDifference& difference);
std::vector<std::string> describe(const HashDifference& difference);

}  // namespace invar::app
