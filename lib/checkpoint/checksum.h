#pragma once

#include <cstdint>
#include <span>

#include "core/input_file.h"
#include "core/range.h"

namespace invar {

// CRC-32 as zlib and Python's zlib.crc32 compute it; crc is that of what came before.
uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0);

// The same for some bytes of a file, read in small blocks. Error{kData} names a file that cannot be read.
uint32_t crc32_of(const InputFile& file, Range bytes, uint32_t crc = 0);

}  // namespace invar
