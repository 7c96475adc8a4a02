#include "data/megatron_order.h"

#include <array>
#include <limits>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "data/numpy_random.h"

namespace invar {
namespace {

constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();

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
                       std::span<const int32_t> lengths) {
  const auto length_at = [&](int32_t entry) {
    return lengths[static_cast<size_t>(document_index[static_cast<size_t>(entry)])];
  };
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
                format("train.seed = {} is past 2^32 - 1, the largest that data.kind megatron can use", seed),
                "use a smaller train.seed");
  }
  INVAR_CHECK(samples_wanted >= 0, "samples_wanted = {}", samples_wanted);
  const auto epochs = static_cast<__int128>(samples_wanted) * sequence_length / tokens + 1;
  if (epochs * sequences > kMaxEntries ||
      static_cast<__int128>(samples_wanted) + tokens / sequence_length > kMaxEntries) {
    throw Error(ErrorKind::kData,
                format("{} samples of {} tokens from {} sequences with {} tokens in all make an order of more than "
                       "2^31 - 1 entries",
                       samples_wanted, sequence_length, sequences, tokens),
                samples_wanted > 0 ? "read fewer samples, by train.steps, train.global_batch_size or a weight of "
                                     "data.blend, or make the dataset anew with short documents joined"
                                   : "cut the dataset into several sources, or give data.blend weights");
  }
}

}  // namespace

OrderPlan plan_order(const StoredArray<int32_t>& lengths, int64_t sequence_length, int64_t samples_wanted,
                     uint64_t seed) {
  int64_t tokens = 0;
  visit_blocks(lengths, [&](int64_t, std::span<const int32_t> block) {
    tokens = std::accumulate(block.begin(), block.end(), tokens);
  });
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

OrderArrays build_order(const OrderPlan& plan, const StoredArray<int32_t>& lengths) {
  OrderArrays arrays;
  auto& [documents, starts, shuffled] = arrays;
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
  const std::vector<int32_t> all_lengths = lengths.all();  // they are read in the shuffled order
  for (int64_t i = 0; i < plan.samples; ++i) {
    starts.push_back(next_start(starts.back(), plan.sequence_length, documents, all_lengths));
  }

  shuffled.resize(static_cast<size_t>(plan.samples));
  std::iota(shuffled.begin(), shuffled.end(), 0u);
  const auto cut = static_cast<size_t>(plan.separate_last_epoch ? plan.samples_before_last_epoch : plan.samples);
  random.shuffle(std::span(shuffled).first(cut));
  random.shuffle(std::span(shuffled).subspan(cut));
  return arrays;
}

MegatronOrder in_memory(OrderArrays arrays) {
  return {StoredArray(std::move(arrays.document_index)), StoredArray(std::move(arrays.sample_index)),
          StoredArray(std::move(arrays.shuffle_index))};
}

std::vector<Range> runs_of(const MegatronOrder& order, int64_t sequences,
                           const std::function<Range(int64_t)>& tokens_of, int64_t k, int64_t tokens) {
  const auto check = [&](bool holds) {
    if (holds) return;
    throw Error(ErrorKind::kData, format("the order of samples is damaged at sample {}", k),
                "the index or the files in data.cache_dir were changed while the run reads them; start it again");
  };
  const int64_t index = order.shuffle_index[k];
  check(index + 1 < order.sample_index.size());
  std::array<SampleStart, 2> ends{};
  order.sample_index.read(index, ends);
  const auto& [first, last] = ends;
  check(first.entry >= 0 && first.entry <= last.entry && last.entry < order.document_index.size());
  std::vector<Range> runs;
  const auto add = [&](int64_t entry, int32_t sequence) {
    check(sequence >= 0 && sequence < sequences);
    const Range whole = tokens_of(sequence);
    const int32_t begin = entry == first.entry ? first.offset : 0;
    check(begin >= 0 && begin <= whole.size() && last.offset >= 0 &&
          (entry < last.entry || last.offset < whole.size()));
    const Range run = {whole.begin + begin, entry == last.entry ? whole.begin + last.offset + 1 : whole.end};
    tokens -= run.size();
    check(run.size() >= 0 && tokens >= 0);
    runs.push_back(run);
  };
  const Range entries = {first.entry, int64_t{last.entry} + 1};
  visit_blocks(order.document_index.part(entries), [&](int64_t begin, std::span<const int32_t> block) {
    for (const int32_t sequence : block) add(entries.begin + begin++, sequence);
  });
  check(tokens == 0);
  return runs;
}

}  // namespace invar
