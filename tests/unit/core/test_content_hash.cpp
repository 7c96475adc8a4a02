#include "core/content_hash.h"

#include <set>
#include <vector>

#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

uint64_t hash_of(std::span<const std::byte> bytes) {
  ContentHash hash;
  hash.add(bytes);
  return hash.value();
}

}  // namespace

TEST_CASE("a content hash tells every changed bit, every length, and not how the bytes came") {
  std::vector<std::byte> bytes(61);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(7 * i);
  std::set<uint64_t> seen = {hash_of(bytes)};
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto changed = bytes;
    changed[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(seen.insert(hash_of(changed)).second);
  }
  const std::vector<std::byte> zeros(40);
  for (size_t size = 0; size <= zeros.size(); ++size) CHECK(seen.insert(hash_of(std::span(zeros).first(size))).second);

  ContentHash pieces;
  pieces.add(std::span(bytes).first(16));
  pieces.add(std::span(bytes).subspan(16, 8));
  pieces.add(std::span(bytes).subspan(24));
  CHECK(pieces.value() == hash_of(bytes));
  CHECK(error_of([&] { pieces.add(bytes); }).has_value());  // after a piece of 37 bytes
}
