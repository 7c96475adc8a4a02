#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "core/range.h"

namespace invar {

// CRC-32 as zlib and Python's zlib.crc32 compute it; crc is that of what came before.
uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0);

// Of some columns of a row-major strip of rows, `width` values each.
uint32_t tile_checksum(std::span<const float> strip, int64_t width, Range cols);

// Of a whole file. Error{kData} if it cannot be read.
uint32_t crc32_of_file(const std::filesystem::path& path);

}  // namespace invar
