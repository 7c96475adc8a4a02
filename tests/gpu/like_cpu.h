#pragma once

#include "device_tensor.h"

// What tests compare a GPU's results with: the CPU's, from the same operands.
namespace invar::test {

// Both compute in fp32 and round once; sums of fp32 are in another order. So bf16 results differ by one rounding, and
// only a few of them do.
inline void require_like_cpu(const HostTensor& actual, const HostTensor& expected) {
  const bool f32 = expected.tensor().dtype() == DType::kF32;
  require_close(actual.values(), expected.values(), f32 ? 1e-5 : 0x1.01p-7, 1e-5);
  const auto n = static_cast<double>(expected.size());
  if (n > 0) REQUIRE(relative_norm(actual.values(), expected.values()) < (f32 ? 1e-5 : 3e-4 + 0x1p-6 / std::sqrt(n)));
}

// A sum over many tokens: only the whole is near.
inline void require_sum_like_cpu(const HostTensor& actual, const HostTensor& expected) {
  REQUIRE(relative_norm(actual.values(), expected.values()) < 1e-5);
}

// Elements of a flat tensor from its second one on, in a shape: aligned to an element and no more.
inline Tensor from_second(const Tensor& flat, std::initializer_list<int64_t> shape) {
  return Tensor(static_cast<std::byte*>(flat.raw()) + size_of(flat.dtype()), flat.dtype(), flat.device(), shape);
}

}  // namespace invar::test
