// The token embedding and the output head, both cut by rows of the vocabulary.
#include <numeric>

#include "layer_checks.h"
#include "layers/lm_head.h"
#include "layers/vocab_embedding.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kHidden = 20;
constexpr int64_t kVocabulary = 71;  // of 128 padded rows: the last of 4 ranks has padding only
constexpr int32_t kFrozen = 8;

std::vector<int32_t> token_ids(int64_t tokens) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens; ++i) ids.push_back(static_cast<int32_t>(i % 9 * 8));  // 0, 8, ..., 64; some thrice
  return ids;
}

LayerCase embedding_case(const ops::LookupParams& lookup) {
  LayerCase layer_case;
  const int64_t t = layer_case.tokens;
  layer_case.outputs = {{"h", t, kHidden}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const VocabTable table = add_vocab_table(made_on.setup(), "embedding", kVocabulary, kHidden);
    const VocabEmbedding layer(table, table.weight, lookup);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      std::vector<int32_t> ids = token_ids(t);
      const Tensor tokens(ids.data(), DType::kI32, DeviceType::kCpu, {t});
      const Tensor h = rank.allocate(rank.local_tokens(), kHidden);
      layer.forward(ctx, tokens, h);
      rank.give("h", h);
      if (rank.with_gradients) layer.backward(ctx, tokens, rank.output_gradient("h"));
    };
  };
  return layer_case;
}

// Every third label does not count. tokens: of those of a whole case.
LayerCase head_case(double softcap, Range tokens = {0, LayerCase().tokens}) {
  LayerCase layer_case;
  layer_case.tokens = tokens.size();
  const int64_t t = layer_case.tokens;
  layer_case.inputs = {{"x", t, kHidden}};
  layer_case.outputs = {{"loss", 1, 1, Held::kWhole}};
  layer_case.make = [=](Rank& made_on) -> Body {
    const LmHead layer(add_vocab_table(made_on.setup(), "head", kVocabulary, kHidden), softcap);
    return [=](Rank& rank) {
      const LayerContext ctx = rank.context();
      const Tensor x = rank.input("x");
      std::vector<int32_t> ids;
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        ids.push_back(i % 3 == 1 ? -1 : static_cast<int32_t>(i * 29 % kVocabulary));
      }
      const Tensor labels(ids.data(), DType::kI32, DeviceType::kCpu, {t});
      std::optional<float> scale;
      if (rank.with_gradients) scale = rank.output_gradient("loss").data<float>()[0];
      std::vector<double> losses(static_cast<size_t>(t / ctx.sequence_length));
      const Tensor d_x = layer.loss(ctx, x, labels, scale, view_of(losses));
      rank.give("loss", std::accumulate(losses.begin(), losses.end(), 0.0));
      if (rank.with_gradients) rank.give_gradient("x", d_x);
    };
  };
  return layer_case;
}

}  // namespace

TEST_CASE("token embedding: gradients are derivatives, those of another scale are not") {
  check_derivatives(embedding_case({1.0f, -1}));
  check_derivatives(embedding_case({4.5f, -1}));
  check_derivatives(embedding_case({4.5f, kFrozen}), [](Named& direction) {
    const auto row = direction["embedding"].begin() + kFrozen * kHidden;
    std::fill(row, row + kHidden, 0.0);
  });
  const LayerCase truth = embedding_case({4.5f, -1});
  CHECK(derivative_errors(truth, embedding_case({4.6f, -1})).at("embedding") > kWrong);
  CHECK(derivative_errors(truth, embedding_case({4.5f, kFrozen})).at("embedding") > kWrong);
}

TEST_CASE("token embedding: the frozen token is looked up, but its row has no gradient") {
  const LayerCase trained = embedding_case({4.5f, -1});
  const LayerCase frozen = embedding_case({4.5f, kFrozen});
  const Named point = start_point(trained);
  const PassResult all = run(trained, point, {});
  Values expected = combine(all.gradients).at("embedding");
  const auto row = expected.begin() + kFrozen * kHidden;
  CHECK(std::all_of(row, row + kHidden, [](double gradient) { return gradient != 0; }));
  std::fill(row, row + kHidden, 0.0);
  for (const Layout& layout : {Layout{1, false}, Layout{2, true}, Layout{4, false}}) {
    const PassResult pass = run(frozen, point, layout);
    CHECK(combine(pass.outputs) == combine(all.outputs));
    CHECK(combine(pass.gradients).at("embedding") == expected);
  }
}

TEST_CASE("head: gradients are derivatives, those of another softcap are not") {
  check_derivatives(head_case(0));
  check_derivatives(head_case(2));
  for (const double other : {0.0, 2.2}) {
    for (const auto& [name, error] : derivative_errors(head_case(2), head_case(other))) {
      INFO("along " << name);
      CHECK(error > kWrong);
    }
  }
}

TEST_CASE("token embedding and head: cut over ranks they are the same") {
  SECTION("embedding") {
    check_layouts(embedding_case({4.5f, kFrozen}));
  }
  SECTION("head") {
    check_layouts(head_case(0));
  }
  SECTION("head with softcap") {
    check_layouts(head_case(2));
  }
}

TEST_CASE("head: in invariant numerics the bits are those of one rank, also where a sample is several chunks") {
  const auto all = [](const Layout& layout) {
    const LayerCase layer_case = head_case(0);
    Named point{{"x", normal_values("x", layer_case.tokens * kHidden)},
                {"head", normal_values("head", kVocabulary * kHidden)}};
    const PassResult pass = run(layer_case, point, layout);
    Named values = combine(pass.gradients);
    values.merge(combine(pass.outputs));
    return values;
  };
  const int64_t length = LayerCase().sequence_length;
  const Named whole = all({1, false, 8, length}), in_chunks = all({1, false, 8, 1});
  CHECK(whole.at("head") != in_chunks.at("head"));  // a chunk's gradient is one product: part of the contract
  for (const int tensor : {2, 3, 4, 8}) {
    for (const bool sequence : {false, true}) {
      CAPTURE(tensor, sequence);
      CHECK(all({tensor, sequence, 8, length}) == whole);
      CHECK(all({tensor, sequence, 8, 1}) == in_chunks);
    }
  }
  CHECK(all({4}).at("x") != all({1}).at("x"));
}

TEST_CASE("head: in invariant numerics the gradient is the sum of those of samples, each of one chunk or of several") {
  const Values x = normal_values("x", LayerCase().tokens * kHidden),
               head = normal_values("head", kVocabulary * kHidden);
  const auto gradient = [&](int64_t head_chunk, Range tokens) {
    const Named point{{"x", Values(x.begin() + tokens.begin * kHidden, x.begin() + tokens.end * kHidden)},
                      {"head", head}};
    return combine(run(head_case(0, tokens), point, {1, false, 8, head_chunk}).gradients).at("head");
  };
  const int64_t length = LayerCase().sequence_length, all = LayerCase().tokens;
  REQUIRE(all == 2 * length);
  for (const int64_t head_chunk : {length, int64_t{1}}) {
    CAPTURE(head_chunk);
    Values sum = gradient(head_chunk, {0, length});
    const Values second = gradient(head_chunk, {length, all});
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = static_cast<float>(sum[i]) + static_cast<float>(second[i]);
    CHECK(gradient(head_chunk, {0, all}) == sum);
  }
}

TEST_CASE("head: a rank's rows alone give a part of the gradient") {
  const LayerCase layer_case = head_case(2);
  const Named point = start_point(layer_case);
  const Named one = combine(run(layer_case, point, {}).gradients);
  const PassResult cut = run(layer_case, point, {4, true});
  const Named first = {{"head", cut.gradients[0].at("head").values}};
  CHECK(differences(first, {{"head", one.at("head")}}).at("head") > 0.05);
  const Values& last = cut.gradients[3].at("head").values;
  CHECK(std::all_of(last.begin(), last.end(), [](double gradient) { return gradient == 0; }));
}

TEST_CASE("token embedding and head: gradients add up") {
  check_accumulation(embedding_case({4.5f, kFrozen}));
  check_accumulation(head_case(2));
}
