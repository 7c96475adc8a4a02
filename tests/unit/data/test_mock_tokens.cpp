#include "data/mock_tokens.h"

#include <cstdlib>
#include <set>
#include <vector>

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("mock tokens are Philox numbers of (seed, split, sample, position)") {
  const MockTokens source({.sequence_length = 7, .vocab_size = 100, .seed = 5});
  const Philox random(5, RandomPurpose::kMockTokens, 0);
  const auto tokens = sample_of(source, 3);
  for (uint64_t p = 0; p < 8; ++p) CHECK(static_cast<uint64_t>(tokens[p]) == random.below(3 * 8 + p, 100));
}

TEST_CASE("mock tokens keep their values from version to version") {
  const MockTokens source({.sequence_length = 7, .vocab_size = 151936, .seed = 1234});
  CHECK(sample_of(source, 0) == std::vector<int32_t>{115561, 103903, 76793, 138756, 130298, 66728, 110456, 142035});
}

TEST_CASE("mock tokens cover the whole vocabulary evenly") {
  const MockTokens source({.sequence_length = 9999, .vocab_size = 10, .seed = 1});
  std::vector<int> counts(10);
  for (const int32_t token : sample_of(source, 0)) ++counts.at(static_cast<size_t>(token));
  for (const int count : counts) CHECK(std::abs(count - 1000) < 150);  // five standard deviations
}

TEST_CASE("mock samples differ by seed, split and sample") {
  const TokenRequest request{.sequence_length = 15, .vocab_size = 50000, .seed = 1};
  TokenRequest validation = request;
  validation.split = Split::kValidation;
  TokenRequest other_seed = request;
  other_seed.seed = 2;
  const std::set<std::vector<int32_t>> distinct = {sample_of(MockTokens(request), 0), sample_of(MockTokens(request), 1),
                                                   sample_of(MockTokens(validation), 0),
                                                   sample_of(MockTokens(other_seed), 0)};
  CHECK(distinct.size() == 4);
  CHECK(sample_of(MockTokens(request), 1) == sample_of(MockTokens(request), 1));
}

TEST_CASE("any sample number below samples() can be read, no other") {
  const MockTokens source({.sequence_length = 4096, .vocab_size = 8, .seed = 1});
  CHECK(source.samples() > int64_t{1} << 50);
  CHECK(sample_of(source, source.samples() - 1).size() == 4097);
  require_error(ErrorKind::kFault, {"sample"}, [&] { sample_of(source, source.samples()); });
  require_error(ErrorKind::kFault, {"sample -1"}, [&] { sample_of(source, -1); });
  std::vector<int32_t> short_buffer(4096);
  require_error(ErrorKind::kFault, {"4096 tokens for S = 4096"}, [&] { source.read(0, short_buffer); });
}
