// A safetensors file: all values of its small tensors are read.
#include "checkpoint/safetensors.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = fuzz::file("x.safetensors", fuzz::text_of(data, size));
  fuzz::reads_or_refuses({"x.safetensors"}, [&] {
    const SafetensorsReader reader(path);
    std::vector<float> values;
    for (const std::string& name : reader.names()) {
      const SafetensorsInfo& info = reader.info(name);
      if (info.dtype.starts_with('I')) {
        fuzz::reads_or_refuses({"x.safetensors"}, [&] { reader.read_i64(name); });
        continue;
      }
      const Range rows{0, info.rows()}, cols{0, info.cols()};
      if (cols.size() > 0 && rows.size() > 65536 / cols.size()) continue;
      values.resize(static_cast<size_t>(rows.size() * cols.size()));
      fuzz::reads_or_refuses({"x.safetensors"}, [&] { reader.read_rows(name, rows, cols, values); });
    }
  });
  return 0;
}
