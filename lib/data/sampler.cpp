#include "data/sampler.h"

#include <algorithm>

#include "core/error.h"
#include "core/philox.h"

namespace invar {
namespace {

// The swap-or-not shuffle (Hoang, Morris and Rogaway, CRYPTO 2012): in each round position x has the partner
// pivot − x mod n, and one random bit for the pair says whether the two change places. Each round is a bijection for
// any n, and nothing is stored.
int64_t shuffled(uint64_t seed, int64_t epoch, int64_t samples, int64_t position) {
  constexpr uint64_t kRounds = 64;
  const Philox random(seed, RandomPurpose::kDataOrder, static_cast<uint64_t>(epoch));
  const auto n = static_cast<uint64_t>(samples);
  auto x = static_cast<uint64_t>(position);
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t first = round * (n + 1);  // n + 1 numbers per round: a bit for each pair, and the pivot
    const uint64_t pivot = random.below(first + n, n);
    const uint64_t partner = pivot >= x ? pivot - x : pivot + n - x;
    const bool swap = (random.block(first + std::max(x, partner))[0] & 1u) != 0;
    if (swap) x = partner;
  }
  return static_cast<int64_t>(x);
}

}  // namespace

SampleOrder sample_order(const DataConfig& data, Split split) {
  const bool is_one_flat_file = data.kind == DataKind::kTokens && data.blend.empty();
  return is_one_flat_file && split == Split::kTrain ? SampleOrder::kShuffled : SampleOrder::kSequential;
}

Sampler::Sampler(SampleOrder order, int64_t samples, uint64_t seed) : order_(order), samples_(samples), seed_(seed) {
  INVAR_CHECK(samples >= 1, "samples = {}", samples);
}

int64_t Sampler::sample_at(int64_t global_position) const {
  INVAR_CHECK(global_position >= 0, "global_position = {}", global_position);
  const int64_t position = global_position % samples_;
  if (order_ == SampleOrder::kSequential) return position;
  return shuffled(seed_, global_position / samples_, samples_, position);
}

}  // namespace invar
