// The index of a Hugging Face folder of two shards, whose tensors are a, b and c, d.
#include <array>

#include "checkpoint/safetensors.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

namespace {

void write_shard(const std::string& name, const std::array<std::string, 2>& tensors) {
  SafetensorsWriter writer(fuzz::folder() + "/" + name,
                           {{tensors[0], DType::kF32, {2}}, {tensors[1], DType::kF32, {1}}});
  writer.write_rows(tensors[0], 0, 2, std::array<float, 2>{1, 2});
  writer.write_rows(tensors[1], 0, 1, std::array<float, 1>{3});
  writer.finish();
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool kShards = [] {
    write_shard("1.safetensors", {"a", "b"});
    write_shard("2.safetensors", {"c", "d"});
    return true;
  }();
  fuzz::expect(kShards, "no shards");
  fuzz::file("model.safetensors.index.json", fuzz::text_of(data, size));
  fuzz::reads_or_refuses({fuzz::folder()}, [] {
    const SafetensorsReader reader(fuzz::folder());
    for (const std::string& name : reader.names()) reader.info(name);
  });
  return 0;
}
