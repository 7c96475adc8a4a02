#pragma once

#include "core/philox.h"
#include "data/token_source.h"

namespace invar {

// Tokens drawn uniformly from the whole vocabulary; the train and validation splits are separate random streams.
// Position p of sample k is number k·(S + 1) + p of the stream.
class MockTokens final : public TokenSource {
 public:
  explicit MockTokens(const TokenRequest& request);

  int64_t samples() const override;  // as many as 63 bits can number
  std::string describe() const override;

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override;

  TokenRequest request_;
  Philox random_;
};

}  // namespace invar
