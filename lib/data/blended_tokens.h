#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "config/blend.h"
#include "data/blend_order.h"
#include "data/sampler.h"
#include "data/token_source.h"

namespace invar {

// The sources of data.blend, each as data.path of the same kind would be, in the order of Megatron's BlendedDataset.
// - With weights, source d gives ceil(samples_wanted · weight) samples; megatron sources are laid out for 0.5 % more,
//   as Megatron does, and for more epochs where that does not suffice.
// - Without weights, each source weighs as many samples as it has. Megatron sources are then read once, so that the
//   blend ends with them (a single one goes on into further epochs); flat ones go on.
// - Where no sample may come twice, the blend ends before the first one that would: at the end of the source that runs
//   out first.
// - A flat source is shuffled within itself, epoch after epoch, as it is alone (Sampler).
class BlendedTokens final : public TokenSource {
 public:
  BlendedTokens(const DataConfig& data, const TokenRequest& request);

  int64_t samples() const override { return order_->size(); }
  std::string describe() const override;
  std::vector<std::string> warnings() const override;
  std::vector<InputPrint> inputs() const override;

 private:
  struct Source {
    std::unique_ptr<TokenSource> tokens;
    Sampler sampler;
  };

  static Source open(const DataConfig& data, TokenRequest request, const Blend& blend, size_t d, int64_t samples);
  // Fill sources and order; the weights that it was made of.
  std::vector<double> blend_by_weight(const DataConfig& data, const TokenRequest& request, const Blend& blend);
  std::vector<double> blend_by_size(const DataConfig& data, const TokenRequest& request, const Blend& blend);
  int64_t positions_without_repetition() const;
  // What each source lists, in one list.
  template <class T, class Lists>
  std::vector<T> gather(const Lists& lists) const;
  void fill(int64_t sample, std::span<int32_t> tokens) const override;

  std::vector<Source> sources_;
  std::optional<BlendOrder> order_;  // empty only while the sources are opened
};

}  // namespace invar
