#pragma once

#include <string_view>

#include "device/stream.h"

namespace invar::ops::cuda {

// out[s][c] += the sum of terms[s][r][c] over rows r, for each of `sums` sums, in an order that depends on `rows`
// alone: the end of a sum over tokens whose blocks wrote a row of partial sums each. terms (sums, rows, columns), out
// (sums, columns), all f32; rows >= 1. `op` is named if the launch fails.
void add_column_sums(const Stream& stream, std::string_view op, const float* terms, int64_t sums, int64_t rows,
                     int64_t columns, float* out);

}  // namespace invar::ops::cuda
