#include "data/megatron_order.h"

#include <limits>
#include <numeric>

#include "core/error.h"
#include "data/numpy_random.h"

namespace invar {
namespace {

constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();

struct Arrays {
  std::vector<int32_t> document_index;
  std::vector<SampleStart> sample_index;
  std::vector<uint32_t> shuffle_index;
};

// The sequences 0, 1, ... of each epoch, shuffled in one go.
void append_epochs(NumpyRandomState& random, int64_t epochs, int64_t sequences, std::vector<int32_t>& order) {
  const size_t begin = order.size();
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    order.resize(order.size() + static_cast<size_t>(sequences));
    std::iota(order.end() - sequences, order.end(), 0);
  }
  random.shuffle(std::span(order).subspan(begin));
}

// Walks over S + 1 tokens and steps back onto the last of them. Where that token ends its sequence, the next sample
// begins on it, not at offset 0 of the following sequence.
SampleStart next_start(SampleStart at, int64_t sequence_length, std::span<const int32_t> document_index,
                       SequenceLengths lengths) {
  const auto length_at = [&](int32_t entry) { return lengths[document_index[static_cast<size_t>(entry)]]; };
  int64_t need = sequence_length + 1;
  while (length_at(at.entry) - at.offset < need) {
    need -= length_at(at.entry) - at.offset;
    at = {at.entry + 1, 0};
    INVAR_CHECK(at.entry < std::ssize(document_index), "sample past the last sequence");
  }
  return {at.entry, static_cast<int32_t>(at.offset + need - 1)};
}

void check_limits(int64_t tokens, int64_t sequences, int64_t sequence_length, int64_t samples_wanted, uint64_t seed) {
  if (tokens == 0) throw Error(ErrorKind::kData, "the split of the Megatron dataset holds no tokens");
  if (seed > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorKind::kConfig,
                format("train.seed = {} is past 2^32 - 1, the largest that data.kind megatron can use", seed));
  }
  INVAR_CHECK(samples_wanted >= 0, "samples_wanted = {}", samples_wanted);
  const auto epochs = static_cast<__int128>(samples_wanted) * sequence_length / tokens + 1;
  if (epochs * sequences > kMaxEntries ||
      static_cast<__int128>(samples_wanted) + tokens / sequence_length > kMaxEntries) {
    throw Error(ErrorKind::kData,
                format("{} samples of {} tokens from {} sequences with {} tokens in all make an order of more than "
                       "2^31 - 1 entries",
                       samples_wanted, sequence_length, sequences, tokens),
                "use more data or fewer steps");
  }
}

}  // namespace

OrderPlan plan_order(SequenceLengths lengths, int64_t sequence_length, int64_t samples_wanted, uint64_t seed) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < lengths.size(); ++i) tokens += lengths[i];
  check_limits(tokens, lengths.size(), sequence_length, samples_wanted, seed);
  const auto samples_in = [&](int64_t count) { return (count - 1) / sequence_length; };
  OrderPlan plan;
  plan.sequence_length = sequence_length;
  plan.seed = static_cast<uint32_t>(seed);
  plan.sequences = lengths.size();
  plan.epochs = samples_wanted * sequence_length / tokens + 1;  // enough for one token more than that
  plan.samples = samples_in(plan.epochs * tokens);
  if (plan.epochs > 1) {
    plan.samples_before_last_epoch = samples_in((plan.epochs - 1) * tokens);
    const int64_t from_last_epoch = samples_wanted - plan.samples_before_last_epoch;
    plan.separate_last_epoch = from_last_epoch < static_cast<int64_t>(0.80 * static_cast<double>(samples_in(tokens)));
  }
  return plan;
}

MegatronOrder build_order(const OrderPlan& plan, SequenceLengths lengths) {
  const auto arrays = std::make_shared<Arrays>();
  auto& [documents, starts, shuffled] = *arrays;
  // One generator for everything below: the order of the draws is part of the result.
  NumpyRandomState random(plan.seed);
  documents.reserve(static_cast<size_t>(plan.entries()));
  if (plan.separate_last_epoch) {
    append_epochs(random, plan.epochs - 1, plan.sequences, documents);
    append_epochs(random, 1, plan.sequences, documents);
  } else {
    append_epochs(random, plan.epochs, plan.sequences, documents);
  }

  starts.reserve(static_cast<size_t>(plan.samples) + 1);
  starts.push_back({0, 0});
  for (int64_t i = 0; i < plan.samples; ++i) {
    starts.push_back(next_start(starts.back(), plan.sequence_length, documents, lengths));
  }

  shuffled.resize(static_cast<size_t>(plan.samples));
  std::iota(shuffled.begin(), shuffled.end(), 0u);
  const auto cut = static_cast<size_t>(plan.separate_last_epoch ? plan.samples_before_last_epoch : plan.samples);
  random.shuffle(std::span(shuffled).first(cut));
  random.shuffle(std::span(shuffled).subspan(cut));
  return {documents, starts, shuffled, arrays};
}

std::vector<Piece> pieces_of(const MegatronOrder& order, SequenceLengths lengths, int64_t k, int64_t tokens) {
  const auto check = [&](bool holds) {
    if (holds) return;
    throw Error(ErrorKind::kData, format("the order of samples is damaged at sample {}", k),
                "remove the files in data.cache_dir");
  };
  const size_t index = order.shuffle_index[static_cast<size_t>(k)];
  check(index + 1 < order.sample_index.size());
  const SampleStart first = order.sample_index[index];
  const SampleStart last = order.sample_index[index + 1];
  check(first.entry >= 0 && first.entry <= last.entry && last.entry < std::ssize(order.document_index));
  std::vector<Piece> pieces;
  for (int32_t entry = first.entry; entry <= last.entry; ++entry) {
    const int32_t sequence = order.document_index[static_cast<size_t>(entry)];
    check(sequence >= 0 && sequence < lengths.size());
    const int32_t length = lengths[sequence];
    const int32_t begin = entry == first.entry ? first.offset : 0;
    check(begin >= 0 && begin <= length && last.offset >= 0 && (entry < last.entry || last.offset < length));
    const int32_t end = entry == last.entry ? last.offset + 1 : length;
    pieces.push_back({sequence, begin, end - begin});
    tokens -= end - begin;
    check(end >= begin && tokens >= 0);
  }
  check(tokens == 0);
  return pieces;
}

}  // namespace invar
