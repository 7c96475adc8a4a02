#pragma once

// What the reader and the writer of safetensors share.

#include <bit>
#include <cstdint>
#include <string_view>

namespace invar::safetensors {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is not swapped here");

inline constexpr int64_t kLengthBytes = 8;
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::string_view kSingleFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// Bytes per element, or 0 for a dtype that is not known.
int64_t dtype_bytes(std::string_view dtype);

// IEEE binary16; every value is exact in float.
float half_to_float(uint16_t bits);

}  // namespace invar::safetensors
