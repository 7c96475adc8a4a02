#include "models/decoder_layer.h"

#include "ops/elementwise.h"
#include "unit/layers/layer_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;
constexpr int64_t kHeadDim = 6;
constexpr int64_t kWidth = 24;  // per-layer inputs: 8 blocks of 3
constexpr int64_t kBlock = 3;

Range per_layer_columns(int size, int rank) {
  const Range units = split_units(kWidth / kBlock, size)[static_cast<size_t>(rank)];
  return {units.begin * kBlock, units.end * kBlock};
}

struct Options {
  bool every_part = true;  // output norms, per-layer input, scalar; else the layer of Qwen3
  bool per_layer_input = true;
  int layers = 1;          // of two, the second borrows the first one's keys and values
  bool recompute = false;  // backward from a second forward
  bool keep = false;       // nothing is made again
  bool forget_kv = false;  // control: the first layer does not get the second one's d_kv
  double norm_eps = 1e-6;
  int64_t window = 5;
};

std::string layer_prefix(int layer) {
  return format("{}.", layer);
}

AttentionSpec attention_spec(const Options& options, int layer) {
  AttentionSpec spec;
  spec.prefix = layer_prefix(layer);
  spec.hidden_size = kHidden;
  spec.query_heads = 8;
  spec.kv_heads = 2;
  spec.head_dim = kHeadDim;
  spec.norm_eps = options.norm_eps;
  spec.scale = options.every_part ? 1.0 : 0.4;
  if (!options.every_part) return spec;
  spec.window = options.window;
  spec.normed_values = true;
  spec.borrows = layer == 1;
  return spec;
}

LayerSpec layer_spec(const Options& options, int layer) {
  const std::string prefix = layer_prefix(layer);
  LayerSpec spec;
  spec.norm_eps = options.norm_eps;
  spec.input_norm = prefix + "input_norm";
  spec.attention = attention_spec(options, layer);
  spec.mlp_norm = prefix + "mlp_norm";
  spec.mlp.prefix = prefix;
  spec.mlp.hidden_size = kHidden;
  spec.mlp.intermediate_size = 54;
  spec.mlp.block_width = 6;
  if (!options.every_part) return spec;
  spec.mlp.activation = ops::Activation::kGeluTanh;
  spec.attention_output_norm = prefix + "attention_output_norm";
  spec.mlp_output_norm = prefix + "mlp_output_norm";
  spec.scalar = prefix + "scalar";
  if (!options.per_layer_input) return spec;
  spec.per_layer.gate = prefix + "per_layer_gate";
  spec.per_layer.projection = prefix + "per_layer_projection";
  spec.per_layer.hidden_size = kHidden;
  spec.per_layer.width = kWidth;
  spec.per_layer.block = kBlock;
  spec.per_layer_output_norm = prefix + "per_layer_output_norm";
  return spec;
}

// The layers of a pass and what they share.
struct Stack {
  std::vector<std::shared_ptr<DecoderLayer>> layers;
  std::vector<DecoderLayer::Saved> saved;
  std::vector<DecoderLayer::Shared> shared;
  SharedKv kv;
};

void allocate_shared(Rank& rank, const Options& options, Stack& stack) {
  const int64_t tokens = rank.region.tokens();
  if (stack.layers.size() == 2) {
    stack.kv = {rank.allocate(tokens, stack.layers[0]->kv_width()), rank.allocate(tokens, stack.layers[0]->kv_width())};
    ops::zero(rank.stream, stack.kv.d_kv);
  }
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    DecoderLayer::Shared& shared = stack.shared.emplace_back();
    if (stack.layers.size() == 2) shared.kv = &stack.kv;
    if (!options.per_layer_input) continue;
    shared.input = rank.input(format("input{}", i));
    shared.d_input = rank.allocate(tokens, shared.input.dim(1));
  }
}

void forward(Rank& rank, const Options& options, Stack& stack) {
  LayerContext ctx = rank.context();
  ctx.keep = options.keep;
  Tensor h = rank.input("h");
  stack.saved.resize(stack.layers.size());
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    const Tensor h_out = rank.allocate(h.dim(0), h.dim(1));
    const Arena::Mark mark = rank.saved.mark();
    stack.layers[i]->forward(ctx, stack.shared[i], h, h_out, stack.saved[i]);
    if (options.recompute) {
      Rank::poison(rank.saved, mark);
      stack.saved[i] = {};
      stack.saved[i].h = h;
    }
    h = h_out;
  }
  rank.give("h", h);
}

void backward(Rank& rank, const Options& options, Stack& stack) {
  LayerContext ctx = rank.context();
  ctx.keep = options.keep;
  const Tensor d_h = rank.output_gradient("h");
  for (size_t i = stack.layers.size(); i-- > 0;) {
    Rank::poison(rank.scratch);
    if (options.recompute) {
      stack.layers[i]->forward(ctx, stack.shared[i], stack.saved[i].h, Tensor(), stack.saved[i]);
      Rank::poison(rank.scratch);
    }
    stack.layers[i]->backward(ctx, stack.shared[i], stack.saved[i], d_h);
    if (options.per_layer_input) rank.give_gradient(format("input{}", i), stack.shared[i].d_input);
    if (i == 1 && options.forget_kv) ops::zero(ctx.stream, stack.kv.d_kv);
  }
  rank.give_gradient("h", d_h);
}

LayerCase decoder_case(const Options& options) {
  LayerCase layer_case;
  layer_case.inputs = {{"h", layer_case.tokens, kHidden}};
  layer_case.outputs = {{"h", layer_case.tokens, kHidden}};
  for (int i = 0; options.per_layer_input && i < options.layers; ++i) {
    layer_case.inputs.push_back({format("input{}", i), layer_case.tokens, kWidth, Held::kColumns, per_layer_columns});
  }
  layer_case.make = [=](Rank& made_on) -> Body {
    std::vector<std::shared_ptr<DecoderLayer>> layers;
    for (int i = 0; i < options.layers; ++i) {
      layers.push_back(
          std::make_shared<DecoderLayer>(made_on.setup(), layer_spec(options, i), made_on.rope(50, kHeadDim, 2)));
    }
    return [=](Rank& rank) {
      Stack stack;
      stack.layers = layers;
      allocate_shared(rank, options, stack);
      forward(rank, options, stack);
      if (rank.with_gradients) backward(rank, options, stack);
    };
  };
  return layer_case;
}

Options plain() {
  Options options;
  options.every_part = false;
  options.per_layer_input = false;
  return options;
}

Options without_per_layer_input() {
  Options options;
  options.per_layer_input = false;
  return options;
}

Options two_layers() {
  Options options;
  options.layers = 2;
  return options;
}

}  // namespace

TEST_CASE("decoder layer: gradients are derivatives") {
  SECTION("as in Qwen3") {
    check_derivatives(decoder_case(plain()));
  }
  SECTION("every part") {
    check_derivatives(decoder_case({}));
  }
  SECTION("one that lends keys and values to another") {
    check_derivatives(decoder_case(two_layers()));
  }
}

TEST_CASE("decoder layer: wrong gradients are no derivatives") {
  Options other;
  other.norm_eps = 0.1;
  for (const auto& [name, error] : derivative_errors(decoder_case({}), decoder_case(other))) {
    INFO("along " << name);
    CHECK(error > kWrong);
  }
  other = {};
  other.window = 6;
  CHECK(derivative_errors(decoder_case({}), decoder_case(other)).at("all") > kWrong);
  other = two_layers();
  other.forget_kv = true;
  const auto errors = derivative_errors(decoder_case(two_layers()), decoder_case(other));
  for (const char* through_kv : {"h", "0.k_proj.weight", "0.v_proj.weight", "0.k_norm.weight", "0.input_norm"}) {
    INFO("along " << through_kv);
    CHECK(errors.at(through_kv) > kWrong);
  }
  CHECK(errors.at("1.q_proj.weight") < kDerivativeTolerance);
  CHECK(errors.at("0.gate_proj.weight") < kDerivativeTolerance);
}

TEST_CASE("decoder layer: cut over ranks it is the same") {
  SECTION("as in Qwen3") {
    check_layouts(decoder_case(plain()));
  }
  SECTION("every part") {
    check_layouts(decoder_case({}));
  }
  SECTION("one that lends keys and values to another") {
    check_layouts(decoder_case(two_layers()));
  }
}

TEST_CASE("decoder layer: under sequence parallelism each rank has a term of the norms' gradients") {
  const LayerCase layer_case = decoder_case({});
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  const PassResult cut = run(layer_case, point, {3, true});
  for (const char* name : {"0.input_norm", "0.attention_output_norm", "0.mlp_norm", "0.mlp_output_norm",
                           "0.per_layer_output_norm", "0.q_norm.weight", "0.k_norm.weight"}) {
    INFO(name);
    Values sum(one.at(name).size(), 0.0);
    for (const auto& rank : cut.gradients) {
      const Values& term = rank.at(name).values;
      CHECK(differences({{name, term}}, {{name, one.at(name)}}).at(name) > 0.05);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += term[i];
    }
    CHECK(differences({{name, sum}}, {{name, one.at(name)}}).at(name) < kLayoutTolerance);
  }
}

TEST_CASE("decoder layer: the scalar multiplies the whole output, and the gradient on its way back") {
  const LayerCase layer_case = decoder_case({});
  Named point = start_point(layer_case);
  for (const char* name : {"0.o_proj.weight", "0.down_proj.weight", "0.per_layer_projection"}) {
    std::fill(point.at(name).begin(), point.at(name).end(), 0.0);
  }
  point.at("0.scalar") = {0.061};
  const auto scaled = [](Values values) {
    for (double& value : values) value = static_cast<double>(0.061f * static_cast<float>(value));
    return values;
  };
  for (const Layout& layout : {Layout{1, false}, Layout{3, true}}) {
    const PassResult pass = run(layer_case, point, layout);
    CHECK(combine(pass.outputs).at("h") == scaled(point.at("h")));
    CHECK(combine(pass.gradients).at("h") == scaled(loss_weights(layer_case.outputs[0])));
  }
}

TEST_CASE("decoder layer: what backward makes again, or finds kept, gives the same bits") {
  for (Options options : {plain(), Options{}, without_per_layer_input(), two_layers()}) {
    const Named point = start_point(decoder_case(options));
    for (const Layout& layout : {Layout{1, false}, Layout{2, true}, Layout{4, false}}) {
      INFO("parts " << options.every_part << options.per_layer_input << ", layers " << options.layers << ", tensor "
                    << layout.tensor);
      options.recompute = false, options.keep = false;
      const PassResult kept = run(decoder_case(options), point, layout);
      for (const auto& [recompute, keep] : {std::pair{true, false}, {false, true}, {true, true}}) {
        options.recompute = recompute, options.keep = keep;
        const PassResult again = run(decoder_case(options), point, layout);
        CHECK(combine(again.outputs) == combine(kept.outputs));
        CHECK(combine(again.gradients) == combine(kept.gradients));
      }
    }
  }
}

TEST_CASE("decoder layer: gradients add up") {
  check_accumulation(decoder_case(two_layers()));
}
