// The case.json of a reference case whose other files are those of tests/reference/qwen3_batch16.
#include "app/reference_case.h"

#include <filesystem>

#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool kFiles = [] {
    for (const char* name : {"config.json", "expected.safetensors", "model.safetensors"}) {
      std::filesystem::copy_file(std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference/qwen3_batch16" / name,
                                 std::filesystem::path(fuzz::folder()) / name);
    }
    return true;
  }();
  fuzz::expect(kFiles, "no case");
  fuzz::file("case.json", fuzz::text_of(data, size));
  fuzz::reads_or_refuses({"case.json", "expected.safetensors"},
                         [] { const app::ReferenceCase reference(fuzz::folder()); });
  return 0;
}
