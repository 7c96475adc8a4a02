#include "comm/reduction.h"

#include <array>
#include <concepts>
#include <cstring>
#include <type_traits>

namespace invar {
namespace {

template <ReduceOp op, class T>
T combine(T a, T b) {
  if constexpr (std::same_as<T, BF16>) {
    return BF16(combine<op>(static_cast<float>(a), static_cast<float>(b)));
  } else if constexpr (op == ReduceOp::kSum && std::integral<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else if constexpr (op == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (op == ReduceOp::kMax) {
    return a > b || a != a ? a : b;
  } else {
    return a < b || a != a ? a : b;
  }
}

// Block by block, through a sum that stays in the cache: the loop over elements has no branch and becomes vector code.
template <class T, ReduceOp op>
void combine_elements(std::span<const std::byte* const> terms, int64_t count, std::byte* out) {
  constexpr int64_t kBlock = 1024;
  std::array<T, kBlock> sum;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const auto elements = static_cast<size_t>(std::min(kBlock, count - begin));
    const size_t offset = static_cast<size_t>(begin) * sizeof(T);
    std::memcpy(sum.data(), terms[0] + offset, elements * sizeof(T));
    for (const std::byte* const term : terms.subspan(1)) {
      const T* const next = reinterpret_cast<const T*>(term + offset);
      for (size_t i = 0; i < elements; ++i) sum[i] = combine<op>(sum[i], next[i]);
    }
    std::memcpy(out + offset, sum.data(), elements * sizeof(T));
  }
}

// Calls f with a value of the element type.
template <class F>
void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(BF16{});
    case DType::kF64:
      return f(double{});
    case DType::kI32:
      return f(int32_t{});
    case DType::kI64:
      return f(int64_t{});
  }
}

}  // namespace

void combine_terms(DType dtype, ReduceOp op, std::span<const std::byte* const> terms, int64_t count, std::byte* out) {
  with_dtype(dtype, [&]<class T>(T) {
    switch (op) {
      case ReduceOp::kSum:
        return combine_elements<T, ReduceOp::kSum>(terms, count, out);
      case ReduceOp::kMax:
        return combine_elements<T, ReduceOp::kMax>(terms, count, out);
      case ReduceOp::kMin:
        return combine_elements<T, ReduceOp::kMin>(terms, count, out);
    }
  });
}

}  // namespace invar
