#include "core/input_print.h"

#include <vector>

#include "core/content_hash.h"

namespace invar {

InputPrint print_of(const InputFile& file) {
  constexpr int64_t kEnd = 64 << 10;
  constexpr int64_t kPage = 4 << 10;
  constexpr int64_t kPages = 14;
  ContentHash hash;
  std::vector<std::byte> bytes;
  const auto add = [&](int64_t offset, int64_t size) {
    bytes.assign(static_cast<size_t>((size + 7) / 8 * 8), std::byte{0});  // whole words, as more may follow
    file.read_at(offset, std::span(bytes).first(static_cast<size_t>(size)));
    hash.add(bytes);
  };
  const int64_t size = file.size();
  if (size <= 2 * kEnd + kPages * kPage) {
    add(0, size);
    return {file.path(), size, hash.value()};
  }
  add(0, kEnd);
  const int64_t gap = (size - 2 * kEnd - kPages * kPage) / (kPages + 1);
  for (int64_t page = 0; page < kPages; ++page) add(kEnd + gap + page * (kPage + gap), kPage);
  add(size - kEnd, kEnd);
  return {file.path(), size, hash.value()};
}

}  // namespace invar
