#include "data/sampler.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <vector>

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

std::vector<int64_t> epoch_of(uint64_t seed, int64_t samples, int64_t epoch) {
  const Sampler sampler(SampleOrder::kShuffled, samples, seed);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < samples; ++i) order.push_back(sampler.sample_at(epoch * samples + i));
  return order;
}

bool is_permutation_of_all(std::vector<int64_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != static_cast<int64_t>(i)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("an epoch visits every sample once") {
  for (int64_t samples = 1; samples <= 130; ++samples) {
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      INFO("samples " << samples << ", epoch " << epoch);
      REQUIRE(is_permutation_of_all(epoch_of(1234, samples, epoch)));
    }
  }
  CHECK(is_permutation_of_all(epoch_of(1234, 20011, 5)));
}

TEST_CASE("epochs and seeds have orders of their own, which stay from version to version") {
  CHECK(epoch_of(1234, 10, 0) == std::vector<int64_t>{5, 7, 1, 9, 0, 4, 2, 6, 3, 8});
  const std::set<std::vector<int64_t>> distinct = {epoch_of(1, 100, 0), epoch_of(1, 100, 1), epoch_of(1, 100, 2),
                                                   epoch_of(2, 100, 0)};
  CHECK(distinct.size() == 4);
}

TEST_CASE("all orders of few samples are equally likely") {
  constexpr int kEpochs = 12000;
  std::map<std::vector<int64_t>, int> counts;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) ++counts[epoch_of(7, 4, epoch)];
  REQUIRE(counts.size() == 24);
  double chi_square = 0;
  for (const auto& [order, count] : counts)
    chi_square += (count - kEpochs / 24.0) * (count - kEpochs / 24.0) / (kEpochs / 24.0);
  CHECK(chi_square < 49.7);  // 23 degrees of freedom: exceeded once in a thousand seeds, and this one is fixed
}

TEST_CASE("a long epoch looks random") {
  constexpr int64_t kSamples = 20000;
  const auto order = epoch_of(3, kSamples, 0);
  // Each hundredth of the epoch holds 2 samples of each hundredth of the data on average.
  std::vector<int> cells(100 * 100);
  int neighbours = 0;  // consecutive samples that lie side by side in the data: 2 expected
  int in_place = 0;    // 1 expected
  for (size_t i = 0; i < order.size(); ++i) {
    ++cells[i / 200 * 100 + static_cast<size_t>(order[i]) / 200];
    in_place += order[i] == static_cast<int64_t>(i);
    if (i > 0) neighbours += std::abs(order[i] - order[i - 1]) == 1;
  }
  double chi_square = 0;
  for (const int count : cells) chi_square += (count - 2.0) * (count - 2.0) / 2.0;
  CHECK(std::abs(chi_square - 99.0 * 99.0) < 4 * 140.0);  // 99² degrees of freedom, standard deviation √(2·99²) = 140
  CHECK(neighbours < 10);
  CHECK(in_place < 7);
}

TEST_CASE("the sequential order counts, and begins again") {
  const Sampler sampler(SampleOrder::kSequential, 3, 1);
  for (int64_t position = 0; position < 10; ++position) CHECK(sampler.sample_at(position) == position % 3);
}

TEST_CASE("only the training split of a flat file is shuffled") {
  const auto order_of = [](DataKind kind, const std::string& blend, Split split) {
    DataConfig data;
    data.kind = kind;
    if (!blend.empty()) data.blend = parse_blend(blend);
    return sample_order(data, split);
  };
  CHECK(order_of(DataKind::kTokens, "", Split::kTrain) == SampleOrder::kShuffled);
  CHECK(order_of(DataKind::kTokens, "", Split::kValidation) == SampleOrder::kSequential);
  CHECK(order_of(DataKind::kTokens, "a b", Split::kTrain) == SampleOrder::kSequential);
  CHECK(order_of(DataKind::kMegatron, "", Split::kTrain) == SampleOrder::kSequential);
  CHECK(order_of(DataKind::kMock, "", Split::kTrain) == SampleOrder::kSequential);
}

TEST_CASE("misuse of the sampler is a fault") {
  require_error(ErrorKind::kFault, {"samples = 0"}, [&] { Sampler(SampleOrder::kSequential, 0, 1); });
  require_error(ErrorKind::kFault, {"global_position = -1"},
                [&] { Sampler(SampleOrder::kSequential, 3, 1).sample_at(-1); });
}
