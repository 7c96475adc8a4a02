// A layer reads a weight while it holds it, in every pass. The rig's store shows whoever does not: what all tests of
// layers prove.
#include "layer_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 6;

enum class Reads { kHeld, kHeldTwice, kAfterRelease };

// y = x Wᵀ by a layer that reads W as it says; gives the elements of y that are NaN, and those of another pass that
// holds W again.
LayerCase product_case(Reads reads, std::vector<int64_t>& not_numbers) {
  LayerCase layer_case;
  layer_case.inputs = {{"x", layer_case.tokens, kHidden}};
  layer_case.make = [=, &not_numbers](Rank& made_on) -> Body {
    Parameter parameter;
    parameter.name = "w";
    parameter.shape = {kHidden, kHidden};
    parameter.runs = {{{0, kHidden}, 0}};
    Weight weight;
    weight.name = "w";
    weight.rows = weight.cols = kHidden;
    weight.parameters = {std::move(parameter)};
    const WeightId id = made_on.setup().table.add(std::move(weight));
    return [=, &not_numbers](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x"), y = rank.allocate(x.dim(0), kHidden);
      const auto multiply = [&](const Tensor& w) {
        ctx.sums.multiply(ctx.stream, x, ops::Transpose::kNo, w, ops::Transpose::kYes, y);
        const auto all = y.span<float>();
        not_numbers.push_back(std::ranges::count_if(all, [](float value) { return std::isnan(value); }));
      };
      if (reads == Reads::kAfterRelease) {
        const Tensor kept = ctx.forward_weight(id).value();
        multiply(kept);
      } else {
        const HeldWeight held = ctx.forward_weight(id);
        if (reads == Reads::kHeldTwice) (void)ctx.forward_weight(id);
        multiply(held.value());
      }
      multiply(ctx.backward_weight(id).value());
    };
  };
  return layer_case;
}

std::vector<int64_t> not_numbers_of(Reads reads) {
  std::vector<int64_t> not_numbers;
  const LayerCase layer_case = product_case(reads, not_numbers);
  (void)run(layer_case, start_point(layer_case), {}, false);
  return not_numbers;
}

}  // namespace

TEST_CASE("a layer that keeps a weight's values past its handle computes NaN, one that holds it does not") {
  const int64_t all = LayerCase().tokens * kHidden;
  CHECK(not_numbers_of(Reads::kHeld) == std::vector<int64_t>{0, 0});
  CHECK(not_numbers_of(Reads::kHeldTwice) == std::vector<int64_t>{0, 0});
  CHECK(not_numbers_of(Reads::kAfterRelease) == std::vector<int64_t>{all, 0});
}
