#include "data/megatron_samples.h"

#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "core/error.h"
#include "data/numpy_random.h"

namespace invar {
namespace {

constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();

// How many epochs a run lays out, and how many samples that makes.
struct Plan {
  int64_t epochs = 1;
  int64_t samples = 0;
  int64_t samples_before_last_epoch = 0;
  bool separate_last_epoch = false;
};

Plan plan_epochs(int64_t tokens, int64_t sequence_length, int64_t samples_wanted) {
  const auto samples_in = [&](int64_t count) { return (count - 1) / sequence_length; };
  Plan plan;
  plan.epochs = samples_wanted * sequence_length / tokens + 1;  // enough for one token more than that
  plan.samples = samples_in(plan.epochs * tokens);
  if (plan.epochs > 1) {
    plan.samples_before_last_epoch = samples_in((plan.epochs - 1) * tokens);
    const int64_t from_last_epoch = samples_wanted - plan.samples_before_last_epoch;
    plan.separate_last_epoch = from_last_epoch < static_cast<int64_t>(0.80 * static_cast<double>(samples_in(tokens)));
  }
  return plan;
}

// The sequences 0, 1, ... of each epoch, shuffled in one go.
void append_epochs(NumpyRandomState& random, int64_t epochs, size_t sequences, std::vector<int32_t>& order) {
  const size_t begin = order.size();
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    order.resize(order.size() + sequences);
    std::iota(order.end() - static_cast<std::ptrdiff_t>(sequences), order.end(), 0);
  }
  random.shuffle(std::span(order).subspan(begin));
}

void check_limits(int64_t tokens, size_t sequences, int64_t sequence_length, int64_t samples_wanted, uint64_t seed) {
  if (tokens == 0) throw Error(ErrorKind::kData, "the split of the Megatron dataset holds no tokens");
  if (seed > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorKind::kConfig,
                format("train.seed = {} is past 2^32 - 1, the largest that data.kind megatron can use", seed));
  }
  INVAR_CHECK(samples_wanted >= 1, "samples_wanted = {}", samples_wanted);
  const auto epochs = static_cast<__int128>(samples_wanted) * sequence_length / tokens + 1;
  if (epochs * static_cast<__int128>(sequences) > kMaxEntries ||
      static_cast<__int128>(samples_wanted) + tokens / sequence_length > kMaxEntries) {
    throw Error(ErrorKind::kData,
                format("{} samples of {} tokens from {} sequences with {} tokens in all make an order of more than "
                       "2^31 - 1 entries",
                       samples_wanted, sequence_length, sequences, tokens),
                "use more data or fewer steps");
  }
}

}  // namespace

MegatronSamples::MegatronSamples(std::vector<int32_t> lengths, int64_t sequence_length, int64_t samples_wanted,
                                 uint64_t seed)
    : lengths_(std::move(lengths)), sequence_length_(sequence_length) {
  const int64_t tokens = std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0});
  check_limits(tokens, lengths_.size(), sequence_length, samples_wanted, seed);
  const Plan plan = plan_epochs(tokens, sequence_length, samples_wanted);

  // One generator for everything below: the order of the draws is part of the result.
  NumpyRandomState random(static_cast<uint32_t>(seed));
  if (plan.separate_last_epoch) {
    append_epochs(random, plan.epochs - 1, lengths_.size(), document_index_);
    append_epochs(random, 1, lengths_.size(), document_index_);
  } else {
    append_epochs(random, plan.epochs, lengths_.size(), document_index_);
  }

  sample_index_.reserve(static_cast<size_t>(plan.samples) + 1);
  sample_index_.push_back({0, 0});
  for (int64_t i = 0; i < plan.samples; ++i) sample_index_.push_back(next_start(sample_index_.back()));

  shuffle_index_.resize(static_cast<size_t>(plan.samples));
  std::iota(shuffle_index_.begin(), shuffle_index_.end(), 0u);
  const auto cut = static_cast<size_t>(plan.separate_last_epoch ? plan.samples_before_last_epoch : plan.samples);
  random.shuffle(std::span(shuffle_index_).first(cut));
  random.shuffle(std::span(shuffle_index_).subspan(cut));
}

int32_t MegatronSamples::length_at(int32_t entry) const {
  return lengths_[static_cast<size_t>(document_index_[static_cast<size_t>(entry)])];
}

// Walks over S + 1 tokens and steps back onto the last of them. Where that token ends its sequence, the next sample
// begins on it, not at offset 0 of the following sequence.
MegatronSamples::Start MegatronSamples::next_start(Start at) const {
  int64_t need = sequence_length_ + 1;
  while (length_at(at.entry) - at.offset < need) {
    need -= length_at(at.entry) - at.offset;
    at = {at.entry + 1, 0};
    INVAR_CHECK(at.entry < std::ssize(document_index_), "sample past the last sequence");
  }
  return {at.entry, static_cast<int32_t>(at.offset + need - 1)};
}

std::vector<MegatronSamples::Piece> MegatronSamples::pieces(int64_t sample) const {
  const size_t index = shuffle_index_[static_cast<size_t>(sample)];
  const Start first = sample_index_[index];
  const Start last = sample_index_[index + 1];
  std::vector<Piece> result;
  for (int32_t entry = first.entry; entry <= last.entry; ++entry) {
    const int32_t begin = entry == first.entry ? first.offset : 0;
    const int32_t end = entry == last.entry ? last.offset + 1 : length_at(entry);
    result.push_back({document_index_[static_cast<size_t>(entry)], begin, end - begin});
  }
  return result;
}

}  // namespace invar
