#include "data/blend_order.h"

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

using Picks = std::vector<std::pair<int32_t, int64_t>>;

Picks picks_of(const BlendOrder& order) {
  Picks picks;
  for (int64_t i = 0; i < order.size(); ++i) picks.push_back({order.at(i).source, order.at(i).sample});
  return picks;
}

// One number for a long order: Σ (source + 1) · 31^(positions that follow), modulo 2^64.
uint64_t fingerprint(const BlendOrder& order) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < order.size(); ++i) sum = sum * 31 + static_cast<uint64_t>(order.at(i).source) + 1;
  return sum;
}

// Normalised twice, as Megatron does with the weights of a user.
BlendOrder order_of(const std::vector<double>& weights, int64_t size) {
  return {normalised(weights), size};
}

std::vector<double> sevenths(size_t count) {
  std::vector<double> weights(count);
  for (size_t d = 0; d < count; ++d) weights[d] = static_cast<double>(d * 37 % 101 + 1) / 7;
  return weights;
}

}  // namespace

TEST_CASE("Megatron's order of two and three sources") {
  CHECK(picks_of(order_of({0.3, 0.7}, 12)) ==
        Picks{{1, 0}, {0, 0}, {1, 1}, {1, 2}, {0, 1}, {1, 3}, {1, 4}, {0, 2}, {1, 5}, {1, 6}, {0, 3}, {1, 7}});
  CHECK(picks_of(order_of({1, 1, 2}, 12)) ==
        Picks{{2, 0}, {0, 0}, {1, 0}, {2, 1}, {0, 1}, {2, 2}, {1, 1}, {2, 3}, {0, 2}, {2, 4}, {1, 2}, {2, 5}});
  CHECK(picks_of(order_of({5}, 3)) == Picks{{0, 0}, {0, 1}, {0, 2}});
  CHECK(order_of({0.3, 0.7}, 12).taken(0) == 4);
  CHECK(order_of({0.3, 0.7}, 12).taken(1) == 8);
}

// Computed in Python with numpy 2.4: normalize() twice, then the rule, a position at a time.
TEST_CASE("ties fall as they do with numpy's rounding") {
  // These two differ from position 6 and 35 on if the weights are normalised once.
  CHECK(fingerprint(order_of({0.2, 0.5, 0.2}, 600)) == 0xc11db3290c955a9du);
  CHECK(fingerprint(order_of({0.6, 0.4, 0.4}, 600)) == 0xf3f55eae6f1db364u);
  CHECK(fingerprint(order_of({0.7, 0.6, 0.8, 0.1, 0.8, 0.1, 0.5, 0.7, 0.3, 0.3, 0.9, 0.4}, 600)) ==
        0x64963f4e55e9a25eu);
  // These differ if the weights are added one after the other, or in eight sums throughout.
  CHECK(fingerprint(order_of(sevenths(200), 5000)) == 0xcb9c64225e9650edu);
  CHECK(fingerprint(order_of(sevenths(300), 3000)) == 0x64b8090497ed9a20u);
}

TEST_CASE("the samples of each source are counted through every mark") {
  for (const size_t sources : {1u, 3u, 64u, 65u, 100u}) {
    const BlendOrder order = order_of(sevenths(sources), 20000);
    std::vector<int64_t> taken(sources);
    for (int64_t i = 0; i < order.size(); ++i) {
      const auto [source, sample] = order.at(i);
      INFO("position " << i << " of " << sources << " sources");
      REQUIRE(sample == taken.at(static_cast<size_t>(source))++);
    }
    for (size_t d = 0; d < sources; ++d) CHECK(order.taken(static_cast<int32_t>(d)) == taken[d]);
  }
}

TEST_CASE("misuse of a blend's order is a fault") {
  require_error(ErrorKind::kFault, {"0 positions"}, [] { order_of({1}, 0); });
  require_error(ErrorKind::kFault, {"of 0 sources"}, [] { order_of({}, 1); });
  require_error(ErrorKind::kFault, {"position 3 of 3"}, [] { order_of({1}, 3).at(3); });
  require_error(ErrorKind::kFault, {"position -1"}, [] { order_of({1}, 3).at(-1); });
}
