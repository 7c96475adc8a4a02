#include "data/megatron_samples.h"

#include <algorithm>
#include <numeric>

#include "data/numpy_random.h"
#include "data_files.h"
#include "mock_gpt_lengths.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

using Start = MegatronSamples::Start;
using Starts = std::vector<Start>;

namespace Catch {
template <>
struct StringMaker<Start> {
  static std::string convert(const Start& start) { return invar::format("({},{})", start.entry, start.offset); }
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
  const MegatronSamples order(kLengths, 4, 6, 1234);
  CHECK(order.samples() == 6);
  CHECK(order.document_index() == std::vector<int32_t>{4, 0, 1, 2, 3});
  CHECK(order.sample_index() == Starts{{0, 0}, {0, 4}, {0, 8}, {1, 3}, {2, 2}, {3, 3}, {4, 0}});
  CHECK(order.shuffle_index() == std::vector<uint32_t>{5, 2, 3, 1, 0, 4});
}

TEST_CASE("GPTDataset order: the last epoch apart") {
  const MegatronSamples order(kLengths, 4, 9, 1234);
  CHECK(order.samples() == 12);
  CHECK(order.document_index() == std::vector<int32_t>{4, 0, 1, 2, 3, 3, 2, 1, 0, 4});
  CHECK(order.sample_index() ==
        Starts{{0, 0}, {0, 4}, {0, 8}, {1, 3}, {2, 2}, {3, 3}, {4, 0}, {6, 0}, {6, 4}, {7, 1}, {8, 2}, {9, 1}, {9, 5}});
  CHECK(order.shuffle_index() == std::vector<uint32_t>{0, 4, 3, 2, 5, 1, 7, 6, 9, 8, 11, 10});
}

TEST_CASE("GPTDataset order: the last epoch shuffled with the others") {
  const MegatronSamples order(kLengths, 4, 12, 1234);
  CHECK(order.samples() == 12);
  CHECK(order.document_index() == std::vector<int32_t>{2, 2, 4, 1, 0, 3, 4, 0, 1, 3});
  CHECK(order.sample_index() ==
        Starts{{0, 0}, {0, 4}, {1, 1}, {1, 5}, {2, 2}, {2, 6}, {3, 1}, {4, 2}, {5, 1}, {6, 3}, {6, 7}, {7, 2}, {8, 1}});
  CHECK(order.shuffle_index() == std::vector<uint32_t>{3, 11, 2, 1, 7, 5, 4, 0, 8, 6, 10, 9});
}

TEST_CASE("the pieces of every sample are the S + 1 tokens from its start on") {
  for (const auto& lengths : {kLengths, std::vector<int32_t>{0, 1, 0, 6, 0, 2, 0}, std::vector<int32_t>{1}}) {
    for (const int64_t sequence_length : {1, 2, 4, 11}) {
      const MegatronSamples order(lengths, sequence_length, 15, 7);
      // All tokens of the run in order, as (sequence, offset).
      std::vector<std::pair<int32_t, int32_t>> run;
      for (const int32_t sequence : order.document_index()) {
        for (int32_t offset = 0; offset < lengths[static_cast<size_t>(sequence)]; ++offset)
          run.push_back({sequence, offset});
      }
      REQUIRE(order.samples() >= 15);
      REQUIRE(order.samples() == (std::ssize(run) - 1) / sequence_length);
      for (int64_t k = 0; k < order.samples(); ++k) {
        auto token = run.begin() + order.shuffle_index()[static_cast<size_t>(k)] * sequence_length;
        int64_t count = 0;
        for (const auto& piece : order.pieces(k)) {
          for (int32_t i = 0; i < piece.count; ++i, ++token, ++count) {
            REQUIRE(*token == std::pair{piece.sequence, piece.offset + i});
          }
        }
        REQUIRE(count == sequence_length + 1);
      }
    }
  }
}

TEST_CASE("limits of the order are errors") {
  require_error(ErrorKind::kData, {"holds no tokens"}, [&] { MegatronSamples({0, 0}, 4, 1, 1); });
  require_error(ErrorKind::kConfig, {"4294967296 is past 2^32 - 1"},
                [&] { MegatronSamples(kLengths, 4, 1, uint64_t{1} << 32); });
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"},
                [&] { MegatronSamples(kLengths, 4096, 10'000'000, 1); });
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"},
                [&] { MegatronSamples({1 << 30}, 1, int64_t{1} << 31, 1); });
  require_error(ErrorKind::kData, {"more than 2^31 - 1 entries"}, [&] {
    MegatronSamples({1 << 30, 1 << 30, 1 << 30}, 1, 1, 1);
  });
}

TEST_CASE("GPTDataset order at size: MockGPTDataset, seed 1234, S = 2048, split in thirds") {
  const std::vector<int32_t> lengths = MockGptLengths()(100000);
  REQUIRE(first(lengths, 12) ==
          std::vector<int32_t>{3484, 2609, 2094, 1105, 1261, 168, 309, 68, 718, 3331, 2660, 3738});
  REQUIRE(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == 204'637'097);

  // One epoch of documents [begin, end).
  const auto order_of = [&](int begin, int end) {
    return MegatronSamples({lengths.begin() + begin, lengths.begin() + end}, 2048, 100, 1234);
  };
  // Document d is 1, 2, ..., length − 1, then end-of-document 31999.
  const auto text_of = [&](const MegatronSamples& order, int begin, int64_t sample) {
    std::vector<int64_t> text;
    for (const auto& piece : order.pieces(sample)) {
      const int32_t length = lengths[static_cast<size_t>(begin + piece.sequence)];
      for (int32_t i = piece.offset; i < piece.offset + piece.count; ++i)
        text.push_back(i + 1 < length ? i + 1 : 31999);
    }
    return text;
  };
  const auto sum = [](const std::vector<int64_t>& text) {
    return std::accumulate(text.begin(), text.end(), int64_t{0});
  };

  const auto train = order_of(0, 33333);
  CHECK(train.samples() == 33296);
  CHECK(first(train.document_index(), 8) == std::vector<int32_t>{30903, 11571, 3134, 32473, 27454, 4409, 3622, 19425});
  CHECK(first(train.sample_index(), 4) == Starts{{0, 0}, {0, 2048}, {1, 1095}, {1, 3143}});
  CHECK(train.sample_index().back() == Start{33332, 3421});
  CHECK(first(train.shuffle_index(), 8) == std::vector<uint32_t>{16693, 14248, 13801, 769, 6935, 20026, 19400, 25263});
  const auto text0 = text_of(train, 0, 0);
  CHECK(first(text0, 8) == std::vector<int64_t>{2811, 2812, 2813, 2814, 2815, 2816, 2817, 2818});
  CHECK(text0.back() == 1854);
  CHECK(std::count(text0.begin(), text0.end(), 31999) == 2);
  CHECK(sum(text0) == 1'897'812);
  CHECK(text_of(train, 0, 1).front() == 94);
  CHECK(sum(text_of(train, 0, 1)) == 2'290'782);

  const auto validation = order_of(33333, 66667);
  CHECK(validation.samples() == 33281);
  CHECK(first(validation.shuffle_index(), 4) == std::vector<uint32_t>{28238, 6142, 20671, 16470});
  CHECK(text_of(validation, 33333, 0).front() == 536);
  CHECK(sum(text_of(validation, 33333, 0)) == 3'196'440);

  const auto test = order_of(66667, 100000);
  CHECK(test.samples() == 33343);
  CHECK(first(test.shuffle_index(), 4) == std::vector<uint32_t>{29728, 30054, 23145, 21336});
}
