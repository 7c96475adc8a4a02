#include "data/mock_tokens.h"

#include <limits>

#include "core/format.h"

namespace invar {

MockTokens::MockTokens(const TokenRequest& request)
    : TokenSource(request.sequence_length),
      request_(request),
      random_(request.seed, RandomPurpose::kMockTokens, static_cast<uint64_t>(request.split)) {}

int64_t MockTokens::samples() const {
  return std::numeric_limits<int64_t>::max() / (sequence_length() + 1);
}

std::string MockTokens::describe() const {
  return format("mock tokens, uniform over [0, {}), seed {}, {} stream", request_.vocab_size, request_.seed,
                name_of(request_.split));
}

void MockTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  auto index = static_cast<uint64_t>(sample) * tokens.size();
  const auto bound = static_cast<uint64_t>(request_.vocab_size);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random_.below(index++, bound));
}

}  // namespace invar
