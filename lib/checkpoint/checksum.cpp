#include "checkpoint/checksum.h"

#include <zlib.h>

#include "core/mapped_file.h"

namespace invar {

uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc) {
  return static_cast<uint32_t>(::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

uint32_t tile_checksum(std::span<const float> strip, int64_t width, Range cols) {
  if (cols.size() == width) return crc32(std::as_bytes(strip));
  uint32_t crc = 0;
  for (size_t row = 0; row < strip.size(); row += static_cast<size_t>(width)) {
    crc = crc32(std::as_bytes(strip.subspan(row + static_cast<size_t>(cols.begin), static_cast<size_t>(cols.size()))),
                crc);
  }
  return crc;
}

uint32_t crc32_of_file(const std::filesystem::path& path) {
  return crc32(MappedFile(path.string()).bytes());
}

}  // namespace invar
