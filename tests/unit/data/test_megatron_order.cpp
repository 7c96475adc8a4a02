#include "data/megatron_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "data/numpy_random.h"
#include "data_files.h"
#include "mock_gpt_lengths.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

using Starts = std::vector<SampleStart>;

namespace Catch {
template <>
struct StringMaker<SampleStart> {
  static std::string convert(const SampleStart& start) { return invar::format("({},{})", start.entry, start.offset); }
};
}  // namespace Catch

namespace {

std::vector<int> permutation(uint32_t seed, size_t n) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), 0);
  NumpyRandomState(seed).shuffle(std::span(values));
  return values;
}

const std::vector<int32_t> kLengths = {5, 3, 7, 2, 9};

// Sequences that lie one after another.
std::function<Range(int64_t)> laid_out(const std::vector<int32_t>& lengths) {
  std::vector<int64_t> ends = {0};
  for (const int32_t length : lengths) ends.push_back(ends.back() + length);
  return [ends](int64_t sequence) { return Range{ends.at(sequence), ends.at(sequence + 1)}; };
}

OrderArrays order_of(const std::vector<int32_t>& lengths, int64_t sequence_length, int64_t samples_wanted,
                     uint64_t seed) {
  const StoredArray<int32_t> view(lengths);
  return build_order(plan_order(view, sequence_length, samples_wanted, seed), view);
}

template <class T>
std::vector<T> first(const std::vector<T>& values, size_t count) {
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace

TEST_CASE("permutations of numpy's RandomState") {
  CHECK(permutation(0, 10) == std::vector{2, 8, 4, 9, 1, 6, 7, 3, 0, 5});
  CHECK(permutation(42, 10) == std::vector{8, 1, 5, 0, 7, 2, 9, 4, 3, 6});
  CHECK(permutation(1234, 10) == std::vector{7, 2, 9, 1, 0, 8, 4, 5, 6, 3});
  CHECK(permutation(4294967295u, 1) == std::vector{0});
  CHECK(permutation(1, 0).empty());
}

TEST_CASE("GPTDataset order: one epoch") {
  const OrderArrays order = order_of(kLengths, 4, 6, 1234);
  CHECK(order.shuffle_index.size() == 6);
  CHECK(order.document_index == std::vector<int32_t>{4, 0, 1, 2, 3});
  CHECK(order.sample_index == Starts{{0, 0}, {0, 4}, {0, 8}, {1, 3}, {2, 2}, {3, 3}, {4, 0}});
  CHECK(order.shuffle_index == std::vector<uint32_t>{5, 2, 3, 1, 0, 4});
}

TEST_CASE("GPTDataset order: the last epoch apart") {
  const OrderArrays order = order_of(kLengths, 4, 9, 1234);
  CHECK(order.shuffle_index.size() == 12);
  CHECK(order.document_index == std::vector<int32_t>{4, 0, 1, 2, 3, 3, 2, 1, 0, 4});
  CHECK(order.sample_index ==
        Starts{{0, 0}, {0, 4}, {0, 8}, {1, 3}, {2, 2}, {3, 3}, {4, 0}, {6, 0}, {6, 4}, {7, 1}, {8, 2}, {9, 1}, {9, 5}});
  CHECK(order.shuffle_index == std::vector<uint32_t>{0, 4, 3, 2, 5, 1, 7, 6, 9, 8, 11, 10});
}

TEST_CASE("GPTDataset order: the last epoch shuffled with the others") {
  const OrderArrays order = order_of(kLengths, 4, 12, 1234);
  CHECK(order.shuffle_index.size() == 12);
  CHECK(order.document_index == std::vector<int32_t>{2, 2, 4, 1, 0, 3, 4, 0, 1, 3});
  CHECK(order.sample_index ==
        Starts{{0, 0}, {0, 4}, {1, 1}, {1, 5}, {2, 2}, {2, 6}, {3, 1}, {4, 2}, {5, 1}, {6, 3}, {6, 7}, {7, 2}, {8, 1}});
  CHECK(order.shuffle_index == std::vector<uint32_t>{3, 11, 2, 1, 7, 5, 4, 0, 8, 6, 10, 9});
}

TEST_CASE("the runs of every sample are the S + 1 tokens from its start on") {
  for (const auto& lengths : {kLengths, std::vector<int32_t>{0, 1, 0, 6, 0, 2, 0}, std::vector<int32_t>{1}}) {
    for (const int64_t sequence_length : {1, 2, 4, 11}) {
      const OrderArrays order = order_of(lengths, sequence_length, 15, 7);
      const auto tokens_of = laid_out(lengths);
      const MegatronOrder kept = in_memory(order);
      std::vector<int64_t> run;  // where each token lies, in the shuffled order
      for (const int32_t sequence : order.document_index) {
        const Range tokens = tokens_of(sequence);
        for (int64_t token = tokens.begin; token < tokens.end; ++token) run.push_back(token);
      }
      const int64_t samples = std::ssize(order.shuffle_index);
      REQUIRE(samples >= 15);
      REQUIRE(samples == (std::ssize(run) - 1) / sequence_length);
      for (int64_t k = 0; k < samples; ++k) {
        auto token = run.begin() + order.shuffle_index[static_cast<size_t>(k)] * sequence_length;
        int64_t count = 0;
        for (const Range& part : runs_of(kept, std::ssize(lengths), tokens_of, k, sequence_length + 1)) {
          for (int64_t at = part.begin; at < part.end; ++at, ++token, ++count) REQUIRE(*token == at);
        }
        REQUIRE(count == sequence_length + 1);
      }
    }
  }
}

TEST_CASE("zero samples wanted are one epoch, however short") {
  CHECK(order_of(kLengths, 4, 0, 1234).shuffle_index.size() == 6);
  CHECK(order_of(kLengths, 25, 0, 1234).shuffle_index.size() == 1);
  const OrderArrays none = order_of(kLengths, 26, 0, 1234);
  CHECK(none.document_index.size() == 5);
  CHECK(none.shuffle_index.empty());
}

TEST_CASE("an order that contradicts itself is refused, not followed") {
  const OrderArrays good = order_of(kLengths, 4, 6, 1234);
  std::vector<int32_t> documents;
  Starts starts;
  std::vector<uint32_t> shuffled;
  const auto damaged = [&](int64_t k, auto change) {
    documents = good.document_index;
    starts = good.sample_index;
    shuffled = good.shuffle_index;
    change();
    INFO("sample " << k);
    require_error(ErrorKind::kData, {format("damaged at sample {}", k)}, {"data.cache_dir"}, [&] {
      runs_of(in_memory({documents, starts, shuffled}), 5, laid_out(kLengths), k, 5);
    });
  };
  // Sample 4 begins at (0, 0) and ends at (0, 4), in sequence 4 of 9 tokens; sample 0 runs from (3, 3) to (4, 0).
  damaged(4, [&] { shuffled[4] = 6; });
  damaged(4, [&] { shuffled[4] = 0xffffffffu; });
  damaged(4, [&] { starts[0].entry = -1; });
  damaged(4, [&] { starts[0].entry = 1; });
  damaged(4, [&] { starts[0].offset = -1; });
  damaged(4, [&] { starts[0].offset = 1; });
  damaged(4, [&] { starts[0].offset = 100; });
  damaged(4, [&] { starts[1].offset = 3; });
  damaged(4, [&] { starts[1].offset = 9; });
  damaged(4, [&] { starts[1].offset = -1; });
  damaged(4, [&] { starts[1].entry = 1; });
  damaged(0, [&] { starts[6].entry = 5; });
  damaged(4, [&] { documents[0] = 5; });
  damaged(4, [&] { documents[0] = -1; });
  damaged(0, [&] { documents[3] = 1; });
  damaged(4, [&] { documents[0] = 3; });
}

TEST_CASE("limits of the order are errors") {
  require_error(ErrorKind::kData, {"holds no tokens"}, [&] { order_of({0, 0}, 4, 1, 1); });
  require_error(ErrorKind::kConfig, {"4294967296 is past 2^32 - 1"},
                [&] { order_of(kLengths, 4, 1, uint64_t{1} << 32); });
  // More data of this kind would make as many entries: the samples are too many.
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"}, {"fewer samples"},
                [&] { order_of(kLengths, 4096, 10'000'000, 1); });
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"}, [&] { order_of({1 << 30}, 1, int64_t{1} << 31, 1); });
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"}, [&] {
    order_of({1 << 30, 1 << 30, 1 << 30}, 1, 1, 1);
  });
}

TEST_CASE("GPTDataset order at size: MockGPTDataset, seed 1234, S = 2048, split in thirds") {
  const std::vector<int32_t> lengths = MockGptLengths()(100000);
  REQUIRE(first(lengths, 12) ==
          std::vector<int32_t>{3484, 2609, 2094, 1105, 1261, 168, 309, 68, 718, 3331, 2660, 3738});
  REQUIRE(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == 204'637'097);

  // One epoch of documents [begin, end).
  const auto documents = [&](size_t begin, size_t end) {
    return StoredArray<int32_t>(lengths).part({static_cast<int64_t>(begin), static_cast<int64_t>(end)});
  };
  const auto order_of_part = [&](size_t begin, size_t end) {
    return build_order(plan_order(documents(begin, end), 2048, 100, 1234), documents(begin, end));
  };
  // Document d is 1, 2, ..., length − 1, then end-of-document 31999.
  const auto laid_out_all = laid_out(lengths);
  std::vector<int16_t> token_at;
  for (const int32_t length : lengths) {
    for (int32_t i = 1; i < length; ++i) token_at.push_back(static_cast<int16_t>(i));
    token_at.push_back(31999);
  }
  const auto text_of = [&](const OrderArrays& order, size_t begin, int64_t sample) {
    std::vector<int64_t> text;
    const auto tokens_of = [&](int64_t sequence) { return laid_out_all(static_cast<int64_t>(begin) + sequence); };
    for (const Range& run : runs_of(in_memory(order), 33334, tokens_of, sample, 2049)) {
      for (int64_t at = run.begin; at < run.end; ++at) text.push_back(token_at[static_cast<size_t>(at)]);
    }
    return text;
  };
  const auto sum = [](const std::vector<int64_t>& text) {
    return std::accumulate(text.begin(), text.end(), int64_t{0});
  };

  const auto train = order_of_part(0, 33333);
  CHECK(train.shuffle_index.size() == 33296);
  CHECK(first(train.document_index, 8) == std::vector<int32_t>{30903, 11571, 3134, 32473, 27454, 4409, 3622, 19425});
  CHECK(first(train.sample_index, 4) == Starts{{0, 0}, {0, 2048}, {1, 1095}, {1, 3143}});
  CHECK(train.sample_index.back() == SampleStart{33332, 3421});
  CHECK(first(train.shuffle_index, 8) == std::vector<uint32_t>{16693, 14248, 13801, 769, 6935, 20026, 19400, 25263});
  const auto text0 = text_of(train, 0, 0);
  CHECK(first(text0, 8) == std::vector<int64_t>{2811, 2812, 2813, 2814, 2815, 2816, 2817, 2818});
  CHECK(text0.back() == 1854);
  CHECK(std::count(text0.begin(), text0.end(), 31999) == 2);
  CHECK(sum(text0) == 1'897'812);
  CHECK(text_of(train, 0, 1).front() == 94);
  CHECK(sum(text_of(train, 0, 1)) == 2'290'782);

  const auto validation = order_of_part(33333, 66667);
  CHECK(validation.shuffle_index.size() == 33281);
  CHECK(first(validation.shuffle_index, 4) == std::vector<uint32_t>{28238, 6142, 20671, 16470});
  CHECK(text_of(validation, 33333, 0).front() == 536);
  CHECK(sum(text_of(validation, 33333, 0)) == 3'196'440);

  const auto test = order_of_part(66667, 100000);
  CHECK(test.shuffle_index.size() == 33343);
  CHECK(first(test.shuffle_index, 4) == std::vector<uint32_t>{29728, 30054, 23145, 21336});
}
