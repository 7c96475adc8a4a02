#pragma once

#include <string_view>

#include "device/stream.h"

namespace invar::ops::cuda {

// out[c] += Σ_r partials[r · columns + c], in an order that depends on `rows` alone: the end of a sum over tokens whose
// blocks wrote a row of partial sums each. `op` is named if the launch fails.
void add_column_sums(const Stream& stream, std::string_view op, const float* partials, int64_t rows, int64_t columns,
                     float* out);

}  // namespace invar::ops::cuda
