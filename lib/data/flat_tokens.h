#pragma once

#include "core/range.h"
#include "data/sidecar.h"
#include "data/token_array.h"
#include "data/token_source.h"

namespace invar {

// One long run of tokens in a .bin file: llm.c (its two headers are recognised and checked) or nanoGPT (no header, so
// data.token_dtype or FILE.json must tell the type). The last floor(validation_fraction · tokens) tokens are the
// validation split. A sample consumes S tokens and reads one more, its last label, which the next sample reads again as
// its first input; a shorter rest is not used.
class FlatTokens final : public TokenSource {
 public:
  FlatTokens(const DataConfig& data, const TokenRequest& request);

  int64_t samples() const override { return samples_; }
  std::string describe() const override;
  std::vector<InputPrint> inputs() const override;

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override;

  std::optional<Sidecar> sidecar_;
  TokenArray tokens_;
  Split split_;
  Range part_;  // tokens of this split
  int64_t samples_ = 0;
};

}  // namespace invar
