// The .idx of a Megatron dataset, beside a .bin of 64 tokens of two bytes.
#include "data/token_source.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string kTokens = fuzz::file("corpus.bin", std::string(128, '\1'));
  fuzz::file("corpus.idx", fuzz::text_of(data, size));
  DataConfig config;
  config.kind = DataKind::kMegatron;
  config.path = fuzz::folder() + "/corpus";
  config.split = "1";
  const TokenRequest request{.sequence_length = 4, .vocab_size = 300, .seed = 1, .samples_wanted = 9};
  fuzz::reads_or_refuses({"corpus.idx", "corpus.bin", "corpus"}, [&] {
    const auto tokens = make_token_source(config, request);
    std::vector<int32_t> sample(5);
    for (int64_t at = 0; at < std::min<int64_t>(4, tokens->samples()); ++at) tokens->read(at, sample);
  });
  return 0;
}
