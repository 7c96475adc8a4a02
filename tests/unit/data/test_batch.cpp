#include "data/batch.h"

#include <algorithm>

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kGlobalBatch = 8;

// Sample k is 100·k, 100·k + 1, ...
class CountingSource final : public TokenSource {
 public:
  CountingSource() : TokenSource(3) {}
  int64_t samples() const override { return 20; }
  std::string describe() const override { return "counting"; }

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(100 * sample) + static_cast<int32_t>(i);
  }
};

// The first token of every sample of a step, ranks in order, micro-steps in order.
std::vector<int32_t> global_batch(const Sampler& sampler, int64_t step, int64_t micro_batch, int64_t dp_size) {
  const CountingSource source;
  std::vector<int32_t> firsts;
  Batch batch;
  for (int64_t rank = 0; rank < dp_size; ++rank) {
    const Range own{kGlobalBatch / dp_size * rank, kGlobalBatch / dp_size * (rank + 1)};
    for (int64_t m = 0; m < kGlobalBatch / dp_size / micro_batch; ++m) {
      load_micro_batch(source, sampler, step, {kGlobalBatch, micro_batch, own, m}, batch);
      REQUIRE(std::ssize(batch.tokens) == micro_batch * 3);
      for (size_t b = 0; b < batch.tokens.size(); b += 3) firsts.push_back(batch.tokens[b]);
    }
  }
  return firsts;
}

}  // namespace

TEST_CASE("tokens are the first S of each sample, labels the last S, samples in order") {
  const Sampler sampler(SampleOrder::kSequential, 20, 1);
  Batch batch;
  // Step 1 holds positions 8 to 15; rank 1 of 2 the last four; its micro-step 1 the last two.
  load_micro_batch(CountingSource(), sampler, 1, {kGlobalBatch, 2, {4, 8}, 1}, batch);
  CHECK(batch.tokens == std::vector<int32_t>{1400, 1401, 1402, 1500, 1501, 1502});
  CHECK(batch.labels == std::vector<int32_t>{1401, 1402, 1403, 1501, 1502, 1503});
}

TEST_CASE("a global batch is the same at every layout") {
  const Sampler sampler(SampleOrder::kShuffled, 20, 1234);
  for (int64_t step = 0; step < 6; ++step) {  // crosses two epochs, the first in the middle of step 2
    std::vector<int32_t> expected;
    for (int64_t i = 0; i < kGlobalBatch; ++i) {
      expected.push_back(static_cast<int32_t>(100 * sampler.sample_at(step * kGlobalBatch + i)));
    }
    for (const int64_t dp_size : {1, 2, 4, 8}) {
      for (int64_t micro_batch = 1; micro_batch * dp_size <= kGlobalBatch; micro_batch *= 2) {
        INFO("step " << step << ", dp " << dp_size << ", micro-batch " << micro_batch);
        REQUIRE(global_batch(sampler, step, micro_batch, dp_size) == expected);
      }
    }
  }
}

TEST_CASE("positions whose input ends a document do not count") {
  const CountingSource source;
  const Sampler sampler(SampleOrder::kSequential, 20, 1);
  Batch plain;
  Batch masked;
  load_micro_batch(source, sampler, 0, {4, 4, {0, 4}, 0}, plain);
  const int32_t eod = plain.tokens[1];
  load_micro_batch(source, sampler, 0, {4, 4, {0, 4}, 0}, masked, {eod, true, false});
  REQUIRE(masked.tokens == plain.tokens);
  for (size_t i = 0; i < plain.tokens.size(); ++i) {
    REQUIRE(masked.labels[i] == (plain.tokens[i] == eod ? -1 : plain.labels[i]));
  }
  REQUIRE(masked.labels[1] == -1);
}

// Samples of four inputs and a last label, end to end.
class GivenSource final : public TokenSource {
 public:
  explicit GivenSource(std::vector<std::vector<int32_t>> given) : TokenSource(4), given_(std::move(given)) {}
  int64_t samples() const override { return std::ssize(given_); }
  std::string describe() const override { return "given"; }

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override {
    std::ranges::copy(given_[static_cast<size_t>(sample)], tokens.begin());
  }
  std::vector<std::vector<int32_t>> given_;
};

TEST_CASE("a document begins after the end of the one before it, and with the sample") {
  constexpr int32_t kEod = 9;
  const GivenSource source({{1, 2, 3, 4, 5},  // one document
                            {9, 2, 3, 4, 5},  // the first token ends one
                            {1, 2, 3, 9, 5},  // the last input ends one
                            {1, 2, 3, 4, 9},  // the last label ends one
                            {1, 9, 9, 4, 5},  // a document of its end alone
                            {9, 9, 9, 9, 9}});
  const Sampler sampler(SampleOrder::kSequential, 6, 1);
  Batch batch;
  load_micro_batch(source, sampler, 0, {6, 6, {0, 6}, 0}, batch, {kEod, false, true});
  CHECK(batch.document_starts ==
        std::vector<int32_t>{0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3, 0, 1, 2, 3});
  CHECK(std::ranges::none_of(batch.labels, [](int32_t label) { return label < 0; }));
  const std::vector<int32_t> labels = batch.labels;

  load_micro_batch(source, sampler, 0, {6, 2, {0, 6}, 1}, batch, {kEod, true, true});
  CHECK(batch.document_starts == std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(batch.labels == std::vector<int32_t>{2, 3, 9, -1, 2, 3, 4, 9});

  load_micro_batch(source, sampler, 0, {6, 6, {0, 6}, 0}, batch, {kEod, false, false});
  CHECK(batch.document_starts.empty());
  CHECK(batch.labels == labels);
}

TEST_CASE("a geometry that does not fit is a fault") {
  const CountingSource source;
  const Sampler sampler(SampleOrder::kSequential, 20, 1);
  Batch batch;
  const auto load = [&](BatchGeometry geometry) { load_micro_batch(source, sampler, 0, geometry, batch); };
  require_error(ErrorKind::kFault, {"samples [0, 8) of 8 in micro-batches of 3"}, [&] { load({8, 3, {0, 8}, 0}); });
  require_error(ErrorKind::kFault, {"samples [4, 10) of 8"}, [&] { load({8, 2, {4, 10}, 0}); });
  require_error(ErrorKind::kFault, {"micro-step 2"}, [&] { load({8, 2, {0, 4}, 2}); });
}
