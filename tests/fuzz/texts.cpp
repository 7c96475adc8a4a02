// Short texts inside configs and checkpoints: the first byte chooses blend, split or contract.
#include "config/blend.h"
#include "config/contract.h"
#include "config/split.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(fuzz::text_of(data + 1, size - 1));
  if (data[0] % 3 == 0) {
    // The message is the reason alone; its caller names key and file.
    fuzz::reads_or_refuses({""}, [&] {
      const Blend blend = parse_blend(text);
      fuzz::expect(!blend.empty(), "a blend of nothing");
      const std::string written = text_of(blend);
      if (!written.empty()) fuzz::expect(parse_blend(written) == blend, "a blend is written as another one");
    });
  } else if (data[0] % 3 == 1) {
    fuzz::reads_or_refuses({""}, [&] {
      double sum = 0;
      for (const double weight : parse_split(text)) {
        fuzz::expect(weight >= 0, "a negative weight");
        sum += weight;
      }
      fuzz::expect(sum > 0, "a split of nothing");
    });
  } else {
    const size_t middle = text.find('\0');
    const std::string saved = text.substr(0, middle), now = middle < text.size() ? text.substr(middle + 1) : saved;
    fuzz::expect(saved != now || !first_difference(saved, now).has_value(), "a contract differs from itself");
  }
  return 0;
}
