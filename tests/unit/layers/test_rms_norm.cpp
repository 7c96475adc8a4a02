#include "layers/rms_norm.h"

#include "layer_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;

// With kAdd, x goes on as well, and its gradient is there before.
LayerCase norm_case(ops::Write write, double eps = 1e-6) {
  LayerCase layer_case;
  layer_case.inputs = {{"x", layer_case.tokens, kHidden}};
  layer_case.outputs = {{"y", layer_case.tokens, kHidden}};
  if (write == ops::Write::kAdd) layer_case.outputs.push_back({"stream", layer_case.tokens, kHidden});
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer = std::make_shared<RmsNorm>(made_on.setup(), "norm", kHidden, eps);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      const Tensor y = rank.allocate(x.dim(0), x.dim(1));
      const Tensor rstd = rank.saved.allocate("rstd", DType::kF32, {x.dim(0)});
      layer->forward(ctx, x, y, rstd);
      rank.give("y", y);
      if (write == ops::Write::kAdd) rank.give("stream", x);
      if (!rank.with_gradients) return;
      const Tensor d_x = write == ops::Write::kAdd ? rank.output_gradient("stream") : rank.allocate(x.dim(0), x.dim(1));
      layer->backward(ctx, rank.output_gradient("y"), x, rstd, write, d_x);
      rank.give_gradient("x", d_x);
    };
  };
  return layer_case;
}

}  // namespace

TEST_CASE("RMSNorm: gradients are derivatives, those of another eps are not") {
  check_derivatives(norm_case(ops::Write::kSet));
  check_derivatives(norm_case(ops::Write::kAdd));
  check_derivatives(norm_case(ops::Write::kSet, 0.1));
  for (const auto& [name, error] : derivative_errors(norm_case(ops::Write::kSet), norm_case(ops::Write::kSet, 0.1))) {
    INFO("along " << name);
    CHECK(error > kWrong);
  }
}

TEST_CASE("RMSNorm: cut over ranks it is the same") {
  SECTION("d_x is written") {
    check_layouts(norm_case(ops::Write::kSet));
  }
  SECTION("d_x is added to") {
    check_layouts(norm_case(ops::Write::kAdd));
  }
}

TEST_CASE("RMSNorm: under sequence parallelism ranks have terms of the weight's gradient, else copies of it") {
  const LayerCase layer_case = norm_case(ops::Write::kSet);
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  for (const int tensor : {2, 3}) {
    for (const auto& rank : run(layer_case, point, {tensor, true}).gradients) {
      CHECK_FALSE(rank.at("norm").copy);
      CHECK(differences({{"norm", rank.at("norm").values}}, {{"norm", one.at("norm")}}).at("norm") > 0.05);
    }
    for (const auto& rank : run(layer_case, point, {tensor, false}).gradients) {
      CHECK(rank.at("norm").copy);
      CHECK(rank.at("norm").values == one.at("norm"));
    }
  }
}

TEST_CASE("RMSNorm: gradients add up") {
  check_accumulation(norm_case(ops::Write::kAdd));
}
