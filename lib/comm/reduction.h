#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "core/range.h"

namespace invar {

// What every communicator that adds computes: out[i] = terms[0][i] ⊕ terms[1][i] ⊕ ..., from left to right. terms[r]
// holds `count` elements of rank r. bf16 adds in fp32 and rounds each sum to nearest even; of a NaN and a number, kMax
// and kMin give the NaN. out may be one of the terms.
void combine_terms(DType dtype, ReduceOp op, std::span<const std::byte* const> terms, int64_t count, std::byte* out);

// The part of a buffer of `total` elements that `rank` reduces for the group: equal parts but for one element.
inline Range part_of(int64_t total, int size, int rank) {
  const int64_t quotient = total / size;
  const int64_t remainder = total % size;
  const auto begin = [&](int64_t r) { return r * quotient + std::min(r, remainder); };
  return {begin(rank), begin(rank + 1)};
}

}  // namespace invar
