// A .bin file of tokens: the first byte of the input chooses data.token_dtype, the rest is the file.
#include "data/flat_tokens.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr const char* kTypes[] = {"", "uint16", "uint32"};
  DataConfig config;
  config.kind = DataKind::kTokens;
  config.token_dtype = kTypes[data[0] % 3];
  config.validation_fraction = (data[0] / 3 % 4) * 0.25;
  config.path = fuzz::file("train.bin", fuzz::text_of(data + 1, size - 1));
  const auto split = data[0] / 12 % 2 == 0 ? Split::kTrain : Split::kValidation;
  const TokenRequest request{.split = split, .sequence_length = 4, .vocab_size = 300};
  fuzz::reads_or_refuses({"train.bin", "data."}, [&] {
    const FlatTokens tokens(config, request);
    std::vector<int32_t> sample(5);
    for (const int64_t at : {int64_t{0}, tokens.samples() - 1}) {
      if (at < 0 || at >= tokens.samples()) continue;
      tokens.read(at, sample);
      for (const int32_t id : sample) fuzz::expect(id >= 0 && id < 300, "an id outside of the vocabulary");
    }
  });
  return 0;
}
