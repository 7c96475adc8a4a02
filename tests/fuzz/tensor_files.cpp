// Two tensor files that invar compare takes, the same one twice: safetensors.
#include "app/compare_tensors.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = fuzz::file("x.safetensors", fuzz::text_of(data, size));
  fuzz::reads_or_refuses({"x.safetensors", "no tensor in common"}, [&] {
    const auto file = app::open_safetensors(path);
    for (const auto& tensor : app::compare_tensors(*file, *file, {.exact = true}).tensors) {
      const bool is_equal = tensor.verdict == app::Verdict::kEqual;
      fuzz::expect(is_equal != (tensor.verdict == app::Verdict::kOutside), "a tensor neither equal nor outside");
      fuzz::expect(is_equal || !tensor.mismatch.empty(), "a tensor that differs from itself");
    }
  });
  return 0;
}
