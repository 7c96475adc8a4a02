#include "layers/gated_mlp.h"

#include "layer_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;

// 9 blocks of 6: uneven over 2 and 4 ranks.
LayerCase mlp_case(ops::Activation activation, int64_t intermediate_size = 54, int64_t block_width = 6) {
  GatedMlpSpec spec;
  spec.prefix = "mlp.";
  spec.hidden_size = kHidden;
  spec.intermediate_size = intermediate_size;
  spec.block_width = block_width;
  spec.activation = activation;
  LayerCase layer_case;
  layer_case.inputs = {{"x", layer_case.tokens, kHidden}};
  layer_case.outputs = {{"y", layer_case.tokens, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer = std::make_shared<GatedMlp>(made_on.setup(), spec);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      GatedMlp::Saved saved;
      rank.give("y", layer->forward(ctx, x, saved));
      if (!rank.with_gradients) return;
      rank.give_gradient("x", layer->backward(ctx, x, saved, rank.output_gradient("y")));
    };
  };
  return layer_case;
}

}  // namespace

TEST_CASE("gated MLP: gradients are derivatives, those of another activation are not") {
  check_derivatives(mlp_case(ops::Activation::kGeluTanh));
  check_derivatives(mlp_case(ops::Activation::kSilu));
  const auto errors = derivative_errors(mlp_case(ops::Activation::kGeluTanh), mlp_case(ops::Activation::kSilu));
  for (const auto& [name, error] : errors) {
    INFO("along " << name);
    CHECK(error > kWrong);
  }
}

TEST_CASE("gated MLP: cut over ranks it is the same") {
  SECTION("9 blocks of 6") {
    check_layouts(mlp_case(ops::Activation::kGeluTanh));
  }
  SECTION("35 blocks of 1") {
    check_layouts(mlp_case(ops::Activation::kSilu, 35, 1));
  }
  SECTION("3 blocks: a fourth rank has none") {
    check_layouts(mlp_case(ops::Activation::kGeluTanh, 24, 8));
  }
}

TEST_CASE("gated MLP: a rank's weights alone give a part of the gradient") {
  const LayerCase layer_case = mlp_case(ops::Activation::kGeluTanh);
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  const PassResult cut = run(layer_case, point, {2, false});
  for (const char* name : {"mlp.gate_proj.weight", "mlp.down_proj.weight"}) {
    CHECK(differences({{name, cut.gradients[0].at(name).values}}, {{name, one.at(name)}}).at(name) > 0.05);
  }
}

TEST_CASE("gated MLP: gradients add up") {
  check_accumulation(mlp_case(ops::Activation::kGeluTanh));
}
