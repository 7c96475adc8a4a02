#include "layers/per_layer_embedding.h"

#include "layer_checks.h"
#include "ops/elementwise.h"
#include "parallel/unit_partition.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;
constexpr int64_t kWidth = 24;  // 8 blocks of 3: uneven over 3 ranks
constexpr int64_t kBlock = 3;
constexpr int64_t kLayers = 3;
constexpr int64_t kVocabulary = 13;
constexpr int32_t kFrozen = 5;

Range per_layer_columns(int size, int rank) {
  const Range units = split_units(kWidth / kBlock, size)[static_cast<size_t>(rank)];
  return {units.begin * kBlock, units.end * kBlock};
}

// Every token occurs, some twice.
std::vector<int32_t> token_ids(int64_t tokens) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens; ++i) ids.push_back(static_cast<int32_t>(i * 8 % kVocabulary));
  return ids;
}

PerLayerEmbeddingSpec embedding_spec() {
  PerLayerEmbeddingSpec spec;
  spec.table = "table";
  spec.projection = "projection";
  spec.norm = "norm";
  spec.vocab_size = kVocabulary;
  spec.hidden_size = kHidden;
  spec.layers = kLayers;
  spec.width = kWidth;
  spec.block = kBlock;
  spec.scale = 1.5;
  return spec;
}

// x is an output too, as the residual stream that goes on: backward adds to its gradient.
LayerCase embedding_case(const PerLayerEmbeddingSpec& spec) {
  LayerCase layer_case;
  const int64_t t = layer_case.tokens;
  layer_case.inputs = {{"x", t, kHidden}};
  layer_case.outputs = {{"inputs", kLayers * t, kWidth, Held::kColumns, per_layer_columns}, {"stream", t, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer = std::make_shared<PerLayerEmbedding>(made_on.setup(), spec);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      std::vector<int32_t> ids = token_ids(t);
      const Tensor tokens(ids.data(), DType::kI32, DeviceType::kCpu, {t});
      PerLayerEmbedding::Saved saved;
      layer->forward(ctx, tokens, x, rank.with_gradients, saved);
      rank.give("inputs", saved.inputs);
      rank.give("stream", x);
      if (!rank.with_gradients) return;
      ops::copy(ctx.stream, rank.output_gradient("inputs"), saved.d_inputs);
      const Tensor d_x = rank.output_gradient("stream");
      layer->backward(ctx, tokens, x, saved, d_x);
      rank.give_gradient("x", d_x);
    };
  };
  return layer_case;
}

PerLayerEmbeddingSpec changed(double scale, double norm_eps, int64_t frozen_token) {
  PerLayerEmbeddingSpec spec = embedding_spec();
  spec.scale = scale;
  spec.norm_eps = norm_eps;
  spec.frozen_token = frozen_token;
  return spec;
}

LayerCase gate_case(ops::Activation activation) {
  PerLayerGateSpec spec;
  spec.gate = "gate";
  spec.projection = "projection";
  spec.hidden_size = kHidden;
  spec.width = kWidth;
  spec.block = kBlock;
  spec.activation = activation;
  LayerCase layer_case;
  const int64_t t = layer_case.tokens;
  layer_case.inputs = {{"h", t, kHidden}, {"input", t, kWidth, Held::kColumns, per_layer_columns}};
  layer_case.outputs = {{"y", t, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer = std::make_shared<PerLayerGate>(made_on.setup(), spec);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor h = rank.input("h");
      const Tensor input = rank.input("input");
      PerLayerGate::Saved saved;
      rank.give("y", layer->forward(ctx, h, input, saved));
      if (!rank.with_gradients) return;
      const Tensor d_input = rank.allocate(t, input.dim(1));
      rank.give_gradient("h", layer->backward(ctx, h, input, saved, rank.output_gradient("y"), d_input));
      rank.give_gradient("input", d_input);
    };
  };
  return layer_case;
}

void zero_frozen_row(Named& direction) {
  if (direction.count("table") == 0) return;
  const auto row = direction["table"].begin() + kFrozen * kLayers * kWidth;
  std::fill(row, row + kLayers * kWidth, 0.0);
}

}  // namespace

TEST_CASE("per-layer embedding: gradients are derivatives") {
  check_derivatives(embedding_case(embedding_spec()));
  check_derivatives(embedding_case(changed(1.5, 1e-6, kFrozen)), zero_frozen_row);
  check_derivatives(embedding_case(changed(1.5, 0.02, -1)));
}

TEST_CASE("per-layer embedding: wrong gradients are no derivatives") {
  const LayerCase truth = embedding_case(embedding_spec());
  CHECK(derivative_errors(truth, embedding_case(changed(1.6, 1e-6, -1))).at("table") > kWrong);
  const auto other_eps = derivative_errors(truth, embedding_case(changed(1.5, 0.02, -1)));
  for (const char* name : {"x", "projection", "norm"}) CHECK(other_eps.at(name) > kWrong);
  // A row that is not trained, though its token occurs.
  CHECK(derivative_errors(truth, embedding_case(changed(1.5, 1e-6, kFrozen))).at("table") > kWrong);
}

TEST_CASE("per-layer embedding: the frozen token's row has no gradient, the others have theirs") {
  const Named point = start_point(embedding_case(embedding_spec()));
  Values all = combine(run(embedding_case(embedding_spec()), point, {}).gradients).at("table");
  const Values frozen =
      combine(run(embedding_case(changed(1.5, 1e-6, kFrozen)), point, {3, true}).gradients).at("table");
  const int64_t row = kLayers * kWidth;
  double of_frozen = 0;
  for (int64_t i = kFrozen * row; i < (kFrozen + 1) * row; ++i) {
    const auto at = static_cast<size_t>(i);
    CHECK(frozen[at] == 0.0);
    of_frozen = std::max(of_frozen, std::abs(all[at]));
    all[at] = 0;
  }
  CHECK(of_frozen > 0.1);
  CHECK(frozen == all);  // no rank adds to a row of another
}

TEST_CASE("per-layer embedding and gate: cut over ranks they are the same") {
  SECTION("embedding") {
    check_layouts(embedding_case(embedding_spec()));
  }
  SECTION("gate") {
    check_layouts(gate_case(ops::Activation::kGeluTanh));
  }
}

TEST_CASE("per-layer embedding: each rank's gradients are complete for its columns") {
  const LayerCase layer_case = embedding_case(embedding_spec());
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  for (const Layout& layout : {Layout{2, true}, Layout{3, false}, Layout{3, true}}) {
    const PassResult cut = run(layer_case, point, layout);
    for (int rank = 0; rank < layout.tensor; ++rank) {
      INFO("tensor " << layout.tensor << ", rank " << rank);
      Values expected = one.at("table");
      const Range mine = per_layer_columns(layout.tensor, rank);
      for (size_t i = 0; i < expected.size(); ++i) {
        if (!mine.contains(static_cast<int64_t>(i) % kWidth)) expected[i] = 0;
      }
      const Named actual = {{"table", cut.gradients[static_cast<size_t>(rank)].at("table").values}};
      CHECK(differences(actual, {{"table", expected}}).at("table") < kLayoutTolerance);
      CHECK(differences(actual, {{"table", one.at("table")}}).at("table") > 0.05);
    }
  }
}

TEST_CASE("per-layer gate: gradients are derivatives, those of another activation are not") {
  check_derivatives(gate_case(ops::Activation::kGeluTanh));
  check_derivatives(gate_case(ops::Activation::kSilu));
  const auto errors = derivative_errors(gate_case(ops::Activation::kGeluTanh), gate_case(ops::Activation::kSilu));
  for (const auto& [name, error] : errors) {
    INFO("along " << name);
    CHECK(error > kWrong);
  }
}

TEST_CASE("per-layer inputs cut in another way than the layer's weights give another result") {
  const LayerCase right = gate_case(ops::Activation::kGeluTanh);
  LayerCase wrong = right;
  wrong.inputs[1].columns = [](int size, int rank) { return per_layer_columns(size, size - 1 - rank); };
  const Named point = start_point(right);
  const Named one = combine(run(right, point, {}).outputs);
  CHECK(differences(combine(run(wrong, point, {2, false}).outputs), one).at("y") > 0.1);
  CHECK(differences(combine(run(right, point, {2, false}).outputs), one).at("y") < kLayoutTolerance);
}

TEST_CASE("per-layer embedding and gate: gradients add up") {
  check_accumulation(embedding_case(embedding_spec()));
  check_accumulation(gate_case(ops::Activation::kGeluTanh));
}
