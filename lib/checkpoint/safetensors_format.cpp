#include "checkpoint/safetensors_format.h"

#include <array>
#include <utility>

namespace invar::safetensors {

int64_t dtype_bytes(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, int64_t>, 15> kBytes{{{"F64", 8},
                                                                                {"F32", 4},
                                                                                {"F16", 2},
                                                                                {"BF16", 2},
                                                                                {"F8_E4M3", 1},
                                                                                {"F8_E5M2", 1},
                                                                                {"I64", 8},
                                                                                {"I32", 4},
                                                                                {"I16", 2},
                                                                                {"I8", 1},
                                                                                {"U64", 8},
                                                                                {"U32", 4},
                                                                                {"U16", 2},
                                                                                {"U8", 1},
                                                                                {"BOOL", 1}}};
  for (const auto& [name, bytes] : kBytes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2⁻²⁴
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 0x1fu ? 0xffu : exponent + (127 - 15);  // infinity and NaN keep their place
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

}  // namespace invar::safetensors
