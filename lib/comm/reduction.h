#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "comm/communicator.h"
#include "core/range.h"

namespace invar {

// One step of a reduction: what every communicator computes for two elements. bf16 adds in fp32 and rounds to nearest
// even. Of a NaN and a number, kMax and kMin give the NaN.
template <ReduceOp op, class T>
T combine(T a, T b) {
  if constexpr (std::same_as<T, BF16>) {
    return BF16(combine<op>(static_cast<float>(a), static_cast<float>(b)));
  } else if constexpr (op == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (op == ReduceOp::kMax) {
    return a > b || a != a ? a : b;
  } else {
    return a < b || a != a ? a : b;
  }
}

// The part of a buffer of `total` elements that `rank` reduces for the group: equal parts but for one element.
inline Range part_of(int64_t total, int size, int rank) {
  const int64_t quotient = total / size;
  const int64_t remainder = total % size;
  const auto begin = [&](int64_t r) { return r * quotient + std::min(r, remainder); };
  return {begin(rank), begin(rank + 1)};
}

}  // namespace invar
