#include "layers/self_attention.h"

#include "layer_checks.h"
#include "ops/elementwise.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;
constexpr int64_t kHeadDim = 6;

AttentionSpec qwen3_attention(const std::string& prefix = "a.") {
  AttentionSpec spec;
  spec.prefix = prefix;
  spec.hidden_size = kHidden;
  spec.query_heads = 6;
  spec.kv_heads = 3;
  spec.head_dim = kHeadDim;
  spec.scale = 1 / std::sqrt(6.0);
  return spec;
}

// Two KV heads: the ranks of TP 3 and 4 hold copies.
AttentionSpec gemma4_attention(const std::string& prefix = "a.") {
  AttentionSpec spec = qwen3_attention(prefix);
  spec.query_heads = 8;
  spec.kv_heads = 2;
  spec.scale = 1.0;
  spec.normed_values = true;
  return spec;
}

LayerCase attention_case(const AttentionSpec& spec, int64_t rotated_pairs = kHeadDim / 2) {
  LayerCase layer_case;
  layer_case.inputs = {{"x", layer_case.tokens, kHidden}};
  layer_case.outputs = {{"y", layer_case.tokens, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer =
        std::make_shared<SelfAttention>(made_on.setup(), spec, made_on.rope(50, kHeadDim, rotated_pairs));
    return [layer](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      SelfAttention::Saved saved;
      {
        const ArenaScope scope(rank.scratch);
        rank.give("y", layer->forward(ctx, x, nullptr, saved));
      }
      if (!rank.with_gradients) return;
      rank.give_gradient("x", layer->backward(ctx, x, nullptr, saved, rank.output_gradient("y")));
    };
  };
  return layer_case;
}

Range kv_columns(int size, int rank) {
  const AttentionSpec spec = gemma4_attention();
  const Range heads = partition_heads(spec.query_heads, spec.kv_heads, 0, size, rank).kv_heads;
  return {heads.begin * 2 * kHeadDim, heads.end * 2 * kHeadDim};
}

// A layer alone that takes its keys and values as an input.
LayerCase borrower_case(int64_t window) {
  AttentionSpec spec = gemma4_attention();
  spec.borrows = true;
  spec.window = window;
  LayerCase layer_case;
  layer_case.inputs = {{"x", layer_case.tokens, kHidden},
                       {"kv", layer_case.tokens, spec.kv_heads * 2 * kHeadDim, Held::kColumns, kv_columns}};
  layer_case.outputs = {{"y", layer_case.tokens, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const auto layer = std::make_shared<SelfAttention>(made_on.setup(), spec, made_on.rope(50, kHeadDim, kHeadDim / 2));
    return [layer](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      SharedKv shared{rank.input("kv"), rank.allocate(rank.region.tokens(), layer->kv_width())};
      ops::zero(ctx.stream, shared.d_kv);
      SelfAttention::Saved saved;
      rank.give("y", layer->forward(ctx, x, &shared, saved));
      if (!rank.with_gradients) return;
      rank.give_gradient("x", layer->backward(ctx, x, &shared, saved, rank.output_gradient("y")));
      rank.give_gradient("kv", shared.d_kv);
    };
  };
  return layer_case;
}

// One layer that provides keys and values, "0", and two that borrow them, with inputs and outputs of their own. A
// forgotten borrower's gradient of them is lost: the control.
LayerCase sharing_case(bool values_from_keys, int forgotten = -1) {
  LayerCase layer_case;
  for (const char* number : {"0", "1", "2"}) {
    layer_case.inputs.push_back({std::string("x") + number, layer_case.tokens, kHidden});
    layer_case.outputs.push_back({std::string("y") + number, layer_case.tokens, kHidden});
  }
  layer_case.make = [=](Rank& made_on) -> Body {
    std::vector<std::shared_ptr<SelfAttention>> layers;
    for (int i = 0; i < 3; ++i) {
      AttentionSpec spec = gemma4_attention(format("a{}.", i));
      spec.window = 5;
      spec.borrows = i > 0;
      spec.values_from_keys = values_from_keys && i == 0;
      layers.push_back(
          std::make_shared<SelfAttention>(made_on.setup(), spec, made_on.rope(50, kHeadDim, kHeadDim / 2)));
    }
    return [layers, forgotten](Rank& rank) {
      const LayerContext ctx = rank.context();
      const auto kv = [&] { return rank.allocate(rank.region.tokens(), layers[0]->kv_width()); };
      SharedKv shared{kv(), kv()};
      ops::zero(ctx.stream, shared.d_kv);
      std::vector<Tensor> x;
      std::vector<SelfAttention::Saved> saved(3);
      for (size_t i = 0; i < 3; ++i) {
        x.push_back(rank.input(format("x{}", i)));
        const ArenaScope scope(rank.scratch);
        rank.give(format("y{}", i), layers[i]->forward(ctx, x[i], &shared, saved[i]));
      }
      if (!rank.with_gradients) return;
      const Tensor d_kv_before = kv();
      for (const size_t i : {size_t{2}, size_t{1}, size_t{0}}) {
        const ArenaScope scope(rank.scratch);
        ops::copy(ctx.stream, shared.d_kv, d_kv_before);
        const Tensor d_y = rank.output_gradient(format("y{}", i));
        rank.give_gradient(format("x{}", i), layers[i]->backward(ctx, x[i], &shared, saved[i], d_y));
        if (static_cast<int>(i) == forgotten) ops::copy(ctx.stream, d_kv_before, shared.d_kv);
      }
    };
  };
  return layer_case;
}

AttentionSpec with_window(AttentionSpec spec, int64_t window) {
  spec.window = window;
  return spec;
}

AttentionSpec with_values_from_keys(AttentionSpec spec) {
  spec.values_from_keys = true;
  return spec;
}

// Two samples of 11 tokens: documents of 4 and 7, and of 1, 5 and 5.
LayerCase with_documents(LayerCase layer_case) {
  layer_case.document_starts = {0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 0, 1, 1, 1, 1, 1, 6, 6, 6, 6, 6};
  return layer_case;
}

}  // namespace

TEST_CASE("attention: gradients are derivatives") {
  SECTION("Qwen3") {
    check_derivatives(attention_case(qwen3_attention()));
  }
  SECTION("a window") {
    check_derivatives(attention_case(with_window(qwen3_attention(), 4)));
  }
  SECTION("normed values") {
    check_derivatives(attention_case(gemma4_attention()));
  }
  SECTION("values from keys") {
    check_derivatives(attention_case(with_values_from_keys(gemma4_attention())));
  }
  SECTION("partial RoPE") {
    check_derivatives(attention_case(with_window(gemma4_attention(), 4), 1));
  }
  SECTION("borrowed keys and values as an input") {
    check_derivatives(borrower_case(5));
  }
  SECTION("shared keys and values") {
    check_derivatives(sharing_case(false));
  }
  SECTION("shared keys and values, values from keys") {
    check_derivatives(sharing_case(true));
  }
  SECTION("documents") {
    check_derivatives(with_documents(attention_case(qwen3_attention())));
  }
  SECTION("documents, shared keys and values") {
    check_derivatives(with_documents(sharing_case(true)));
  }
}

TEST_CASE("attention: wrong gradients are no derivatives") {
  const LayerCase truth = attention_case(with_window(gemma4_attention(), 4));
  for (const LayerCase& claim :
       {attention_case(with_window(gemma4_attention(), 5)), attention_case(with_window(gemma4_attention(), 4), 2)}) {
    for (const auto& [name, error] : derivative_errors(truth, claim)) {
      INFO("along " << name);
      CHECK(error > kWrong);
    }
  }
  CHECK(derivative_errors(borrower_case(5), borrower_case(6)).at("kv") > kWrong);
  const LayerCase one_document = attention_case(qwen3_attention());
  for (const auto& [name, error] : derivative_errors(with_documents(one_document), one_document)) {
    INFO("along " << name);
    CHECK(error > kWrong);
  }
  for (const int forgotten : {1, 2}) {
    const auto errors = derivative_errors(sharing_case(false), sharing_case(false, forgotten));
    for (const char* through_kv : {"all", "x0", "a0.k_proj.weight", "a0.v_proj.weight", "a0.k_norm.weight"}) {
      INFO("along " << through_kv);
      CHECK(errors.at(through_kv) > kWrong);
    }
    CHECK(errors.at("x1") < kDerivativeTolerance);
    CHECK(errors.at("a0.q_proj.weight") < kDerivativeTolerance);
  }
}

TEST_CASE("attention: cut over ranks it is the same") {
  SECTION("Qwen3") {
    check_layouts(attention_case(qwen3_attention()));
  }
  SECTION("a window") {
    check_layouts(attention_case(with_window(qwen3_attention(), 4)));
  }
  SECTION("normed values") {
    check_layouts(attention_case(gemma4_attention()));
  }
  SECTION("values from keys") {
    check_layouts(attention_case(with_values_from_keys(gemma4_attention())));
  }
  SECTION("partial RoPE") {
    check_layouts(attention_case(with_window(gemma4_attention(), 4), 1));
  }
  SECTION("borrowed keys and values as an input") {
    check_layouts(borrower_case(5));
  }
  SECTION("shared keys and values") {
    check_layouts(sharing_case(false));
  }
  SECTION("shared keys and values, values from keys") {
    check_layouts(sharing_case(true));
  }
  SECTION("documents") {
    check_layouts(with_documents(attention_case(gemma4_attention())));
  }
}

// With eight leaves runs of query heads are leaves.
void check_invariant(const LayerCase& layer_case, int widest) {
  constexpr int64_t kLeaves = 8;
  const Named point = start_point(layer_case);
  const PassResult any = run(layer_case, point, {}), one = run(layer_case, point, {1, false, kLeaves});
  const Named outputs = combine(one.outputs), gradients = combine(one.gradients);
  const auto largest = [](const std::map<std::string, double>& all) {
    return std::ranges::max_element(all, {}, [](const auto& entry) { return entry.second; })->second;
  };
  CHECK(largest(differences(outputs, combine(any.outputs))) < kLayoutTolerance);
  CHECK(largest(differences(gradients, combine(any.gradients))) < kLayoutTolerance);
  CHECK(gradients != combine(any.gradients));
  for (int tensor = 2; tensor <= widest; ++tensor) {
    for (const bool sequence : {false, true}) {
      INFO("tensor " << tensor << ", sequence " << sequence);
      const PassResult cut = run(layer_case, point, {tensor, sequence, kLeaves});
      CHECK(combine(cut.outputs) == outputs);
      CHECK(combine(cut.gradients) == gradients);
    }
  }
}

TEST_CASE("attention: in invariant numerics it is the same to the bit, whatever ranks have copies of KV heads") {
  SECTION("Qwen3, pairs of query heads") {
    check_invariant(attention_case(qwen3_attention()), 6);
  }
  SECTION("Qwen3, one KV head with query heads in runs of two and one") {
    AttentionSpec spec = qwen3_attention();
    spec.query_heads = 10;
    spec.kv_heads = 1;
    check_invariant(attention_case(spec), 8);
  }
  SECTION("values from keys, a window") {
    check_invariant(attention_case(with_window(with_values_from_keys(gemma4_attention()), 4)), 8);
  }
  SECTION("shared keys and values") {
    check_invariant(sharing_case(false), 8);
  }
  SECTION("shared keys and values, values from keys") {
    check_invariant(sharing_case(true), 8);
  }
  SECTION("documents") {
    check_invariant(with_documents(attention_case(gemma4_attention())), 8);
  }
}

TEST_CASE("attention: a token is seen by itself and by what follows it in its sample and in the window") {
  for (const int64_t window : {0, 4}) {
    const LayerCase layer_case = attention_case(with_window(gemma4_attention(), window));
    Named point = start_point(layer_case);
    const Values before = combine(run(layer_case, point, {}, false).outputs).at("y");
    constexpr int64_t kToken = 13;  // the third of the second sample
    for (int64_t i = 0; i < kHidden; ++i) point.at("x")[static_cast<size_t>(kToken * kHidden + i)] *= -1;
    const Values after = combine(run(layer_case, point, {}, false).outputs).at("y");
    const int64_t end = window == 0 ? layer_case.tokens : kToken + window;
    for (int64_t i = 0; i < layer_case.tokens * kHidden; ++i) {
      const int64_t token = i / kHidden;
      CHECK((before[static_cast<size_t>(i)] != after[static_cast<size_t>(i)]) == (kToken <= token && token < end));
    }
  }
}

TEST_CASE("attention: a document in a sample gives what it gives as a sample") {
  const LayerCase packed = [] {
    LayerCase layer_case = attention_case(with_window(gemma4_attention(), 4));
    layer_case.document_starts = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11};
    layer_case.sequence_length = 22;
    return layer_case;
  }();
  const LayerCase apart = attention_case(with_window(gemma4_attention(), 4));
  const Named point = start_point(apart);
  const PassResult together = run(packed, point, {}), alone = run(apart, point, {});
  // To the bit, which also shows that positions start anew: RoPE is relative, a shift of all positions is but rounding.
  CHECK(combine(together.outputs) == combine(alone.outputs));
  CHECK(combine(together.gradients) == combine(alone.gradients));
}

TEST_CASE("attention: positions turn queries and keys, not values") {
  // Equal tokens that each see themselves alone.
  const LayerCase alone = attention_case(with_window(gemma4_attention(), 1));
  Named point = start_point(alone);
  Values& x = point.at("x");
  for (size_t i = kHidden; i < x.size(); ++i) x[i] = x[i - kHidden];
  const Values y = combine(run(alone, point, {}, false).outputs).at("y");
  for (size_t i = kHidden; i < y.size(); ++i) CHECK(y[i] == y[i - kHidden]);

  // Two tokens change places; the one that sees both would not know without positions.
  const LayerCase all = attention_case(gemma4_attention());
  Named swapped = point = start_point(all);
  std::swap_ranges(swapped.at("x").begin(), swapped.at("x").begin() + kHidden, swapped.at("x").begin() + kHidden);
  const auto third = [&](const Named& at) {
    const Values outputs = combine(run(all, at, {}, false).outputs).at("y");
    return Values(outputs.begin() + 2 * kHidden, outputs.begin() + 3 * kHidden);
  };
  CHECK(differences({{"y", third(swapped)}}, {{"y", third(point)}}).at("y") > 1e-3);
}

TEST_CASE("attention: gradients add up") {
  check_accumulation(attention_case(qwen3_attention()));
  check_accumulation(sharing_case(true));
}

TEST_CASE("attention: what ranks hold copies of is a term of the gradient") {
  const LayerCase layer_case = sharing_case(false);
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  const PassResult cut = run(layer_case, point, {4, false});
  for (const char* name : {"a0.q_norm.weight", "a0.k_norm.weight", "a1.q_norm.weight"}) {
    INFO(name);
    for (const auto& rank : cut.gradients) {
      CHECK_FALSE(rank.at(name).copy);
      CHECK(differences({{name, rank.at(name).values}}, {{name, one.at(name)}}).at(name) > 0.05);
    }
  }
  // A KV head is on two of four ranks; each has the part of its own query heads.
  const Values& first = cut.gradients[0].at("a0.k_proj.weight").values;
  const Values& second = cut.gradients[1].at("a0.k_proj.weight").values;
  CHECK(first[0] != 0);
  CHECK(second[0] != 0);
  CHECK(first[0] + second[0] == Approx(one.at("a0.k_proj.weight")[0]).epsilon(1e-4));
  CHECK(std::abs(first[0] - one.at("a0.k_proj.weight")[0]) > 0.05 * std::abs(first[0]));
}

TEST_CASE("attention: values that are borrowed or taken from keys are normed") {
  for (const bool borrows : {false, true}) {
    AttentionSpec spec = qwen3_attention();
    spec.borrows = borrows;
    spec.values_from_keys = !borrows;
    require_error(ErrorKind::kFault, {"a.", "normed"}, [&] { start_point(attention_case(spec)); });
  }
}

TEST_CASE("attention: a borrower has queries alone and names what files may hold beside them") {
  std::vector<std::string> names;
  std::set<std::string> unused;
  LayerCase layer_case = borrower_case(0);
  const auto make = layer_case.make;
  layer_case.make = [&](Rank& rank) {
    const Body body = make(rank);
    unused = rank.table.unused();
    return body;
  };
  for (const auto& [name, values] : start_point(layer_case)) names.push_back(name);
  CHECK(names == std::vector<std::string>{"a.o_proj.weight", "a.q_norm.weight", "a.q_proj.weight", "kv", "x"});
  CHECK(unused == std::set<std::string>{"a.k_norm.weight", "a.k_proj.weight", "a.v_proj.weight"});
}
