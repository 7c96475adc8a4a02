#pragma once

#include "data/megatron_index.h"
#include "data/order_cache.h"
#include "data/sidecar.h"
#include "data/token_source.h"

namespace invar {

// The path of a Megatron dataset without the ending of one of its two files, unless their names have one more.
std::string megatron_prefix(const std::string& path);

// A Megatron indexed dataset: PREFIX.bin and PREFIX.idx, with data.path = PREFIX, or one of the two files. Sample k is
// what Megatron's GPTDataset with default options gives for index k at the same split, seed, sequence length and number
// of samples. With data.cache_dir the order is kept there in files, which all ranks read.
class MegatronTokens final : public TokenSource {
 public:
  MegatronTokens(const DataConfig& data, const TokenRequest& request);

  int64_t samples() const override { return kept_.order.shuffle_index.size(); }
  std::string describe() const override;
  std::vector<std::string> warnings() const override;
  std::vector<InputPrint> inputs() const override;

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override;

  Split split_;
  MegatronIndex index_;
  TokenArray tokens_;
  std::optional<Sidecar> sidecar_;
  Range sequences_;  // of this split
  KeptOrder kept_;
};

}  // namespace invar
