// The index.bin of a checkpoint. Its sum is made right, so that what it says is what is judged.
#include "checkpoint/checksum.h"
#include "checkpoint/index_table.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* first = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> bytes(first, first + size);
  const uint32_t sum = crc32(bytes);
  const auto* last = reinterpret_cast<const std::byte*>(&sum);
  bytes.insert(bytes.end(), last, last + sizeof sum);
  CheckpointIndex index;
  if (!fuzz::reads_or_refuses({"index.bin"}, [&] { index = decode_index(bytes, "index.bin"); })) return 0;
  fuzz::expect(encode_index(index) == bytes, "an index is written as another one");
  return 0;
}
