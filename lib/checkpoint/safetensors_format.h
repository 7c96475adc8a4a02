#pragma once

// What the reader and the writer of safetensors share.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "core/input_file.h"

namespace invar::safetensors {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is not swapped here");

inline constexpr int64_t kLengthBytes = 8;
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::string_view kSingleFile = "model.safetensors";
inline constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// Bytes per element, or 0 for a dtype that is not known.
int64_t dtype_bytes(std::string_view dtype);

bool is_floating(std::string_view dtype);

// IEEE binary16; every value is exact in float.
float half_to_float(uint16_t bits);

// out.size() elements of a floating dtype, from that many times its bytes at any address.
void convert_floats(std::string_view dtype, std::span<const std::byte> from, std::span<float> out);

// A tensor as a file's header declares it.
struct HeaderEntry {
  SafetensorsInfo info;
  Range bytes;  // in the file
};

// The header's entries by name, checked against each other and the file's size. Throws Error{kData} with file and
// tensor.
std::map<std::string, HeaderEntry> read_header(const InputFile& file);

}  // namespace invar::safetensors
