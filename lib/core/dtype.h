#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace invar {

enum class DType : uint8_t { kF32, kBF16, kF64, kI32, kI64 };

int64_t size_of(DType dtype);           // bytes per element
std::string_view name_of(DType dtype);  // "f32", "bf16", ...

// bfloat16: storage only. Arithmetic is done in float.
struct BF16 {
  uint16_t bits = 0;

  BF16() = default;
  // Round to nearest even; NaN stays NaN.
  explicit BF16(float value) {
    const auto u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(BF16) == 2);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};

}  // namespace invar
