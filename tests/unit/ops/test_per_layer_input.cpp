#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/per_layer_input.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// scale² · mean(projected²) is of the size of eps, so that the place of both in the formula is tested.
constexpr float kScale = 0.3f, kEps = 0.05f;

// Inputs of a whole call, or of a rank that holds a part of the P columns of every layer.
struct PerLayerCase {
  PerLayerCase(DType dtype_, int64_t tokens_, int64_t layers_, int64_t width)
      : PerLayerCase(dtype_, tokens_, {layers_, width, kScale, kEps}, width) {
    const int64_t columns = layers_ * width;
    assign(projected, random_values(tokens_ * columns, 1, 2.0));
    assign(looked_up, random_values(tokens_ * columns, 2));
    assign(weight, random_values(width, 3, 0.5, 1.0));
    assign(d_inputs, random_values(tokens_ * columns, 4));
    assign(d_weight, random_values(width, 5));
  }

  PerLayerCase part(Range columns) const {
    PerLayerCase out(dtype, tokens, params, columns.size());
    const auto cut = [&](const HostTensor& from, HostTensor& to) {
      for (size_t i = 0; i < to.size(); ++i) {
        const size_t row = i / static_cast<size_t>(out.w), column = i % static_cast<size_t>(out.w);
        to.set(i, from[row * static_cast<size_t>(w) + static_cast<size_t>(columns.begin) + column]);
      }
    };
    cut(projected, out.projected);
    cut(looked_up, out.looked_up);
    cut(weight, out.weight);
    cut(d_inputs, out.d_inputs);
    cut(d_weight, out.d_weight);
    // What a rank computes, so far only if the whole has.
    cut(inputs, out.inputs);
    cut(d_projected, out.d_projected);
    cut(d_looked_up, out.d_looked_up);
    return out;
  }

  PerLayerProjection projection() const { return {projected, squares, weight}; }
  void run_squares(const Stream& stream = kCpu) { per_layer_squares(stream, params, projected, squares); }
  void forward(const Stream& stream = kCpu) {
    per_layer_input_forward(stream, params, projection(), looked_up, inputs);
  }
  void run_dots(const Stream& stream = kCpu) { per_layer_dots(stream, params, projection(), d_inputs, dots); }
  void backward(const Stream& stream = kCpu) {
    per_layer_input_backward(stream, params, projection(), d_inputs, dots, d_projected, d_looked_up, d_weight);
  }
  void run(const Stream& stream = kCpu) {
    run_squares(stream);
    forward(stream);
    run_dots(stream);
    backward(stream);
  }

  static void assign(HostTensor& tensor, const Values& values) {
    for (size_t i = 0; i < values.size(); ++i) tensor.set(i, values[i]);
  }

  DType dtype;
  int64_t tokens, w;
  PerLayerInputParams params;
  HostTensor projected, looked_up, weight, d_inputs, d_weight, squares, dots, inputs, d_projected, d_looked_up;

 private:
  PerLayerCase(DType dtype_, int64_t tokens_, const PerLayerInputParams& params_, int64_t w_)
      : dtype(dtype_),
        tokens(tokens_),
        w(w_),
        params(params_),
        projected(dtype, {tokens, params.layers * w}),
        looked_up(dtype, {tokens, params.layers * w}),
        weight(dtype, {w}),
        d_inputs(dtype, {params.layers * tokens, w}),
        d_weight(DType::kF32, {w}),
        squares(DType::kF32, {tokens, params.layers}),
        dots(DType::kF32, {tokens, params.layers}),
        inputs(dtype, {params.layers * tokens, w}),
        d_projected(dtype, {tokens, params.layers * w}),
        d_looked_up(dtype, {tokens, params.layers * w}) {}
};

Values reference(const Values& projected, const Values& looked_up, const Values& weight, size_t tokens, size_t layers) {
  const size_t width = weight.size();
  Values inputs(projected.size());
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t layer = 0; layer < layers; ++layer) {
      const size_t from = (t * layers + layer) * width, to = (layer * tokens + t) * width;
      double squares = 0;
      for (size_t i = 0; i < width; ++i) squares += std::pow(static_cast<double>(kScale) * projected[from + i], 2);
      const double rms = std::sqrt(squares / static_cast<double>(width) + static_cast<double>(kEps));
      for (size_t i = 0; i < width; ++i) {
        const double normed = static_cast<double>(kScale) * projected[from + i] / rms * weight[i];
        inputs[to + i] = (normed + looked_up[from + i]) / std::sqrt(2.0);
      }
    }
  }
  return inputs;
}

// The three gradients, by central differences of the formula.
struct Gradients {
  explicit Gradients(const PerLayerCase& c) {
    const Values p = c.projected.values(), e = c.looked_up.values(), w = c.weight.values(), d = c.d_inputs.values();
    const auto tokens = static_cast<size_t>(c.tokens), layers = static_cast<size_t>(c.params.layers);
    d_projected = numeric_gradient([&](const Values& v) { return dot(reference(v, e, w, tokens, layers), d); }, p);
    d_looked_up = numeric_gradient([&](const Values& v) { return dot(reference(p, v, w, tokens, layers), d); }, e);
    d_weight = plus(c.d_weight.values(),
                    numeric_gradient([&](const Values& v) { return dot(reference(p, e, v, tokens, layers), d); }, w));
  }

  Values d_projected, d_looked_up, d_weight;
};

Values reference_of(const PerLayerCase& c) {
  return reference(c.projected.values(), c.looked_up.values(), c.weight.values(), static_cast<size_t>(c.tokens),
                   static_cast<size_t>(c.params.layers));
}

TEST_CASE("per-layer inputs and their gradients are the formula and its derivative") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(1, 11, 48), layers = GENERATE(1, 3), tokens = 5;
  PerLayerCase c(dtype, tokens, layers, width);
  const Gradients expected(c);
  c.run();
  require_rounded(c.inputs, reference_of(c));
  require_rounded(c.d_projected, expected.d_projected);
  require_rounded(c.d_looked_up, expected.d_looked_up);
  require_close(c.d_weight.values(), expected.d_weight, 2e-6, 2e-6);

  PerLayerCase in_place(dtype, tokens, layers, width);
  in_place.run_squares();
  in_place.run_dots();
  per_layer_input_backward(kCpu, in_place.params, in_place.projection(), in_place.d_inputs, in_place.dots,
                           in_place.projected, in_place.d_looked_up, in_place.d_weight);
  CHECK(in_place.projected.same_bits(c.d_projected));
  CHECK(in_place.d_looked_up.same_bits(c.d_looked_up));
  CHECK(in_place.d_weight.same_bits(c.d_weight));
}

TEST_CASE("per-layer inputs over two ranks with unequal parts of the columns") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t cut = GENERATE(1, 4, 19), width = 20, layers = 3, tokens = 5;
  PerLayerCase whole(dtype, tokens, layers, width);
  const Gradients numeric(whole);
  PerLayerCase parts[] = {whole.part({0, cut}), whole.part({cut, width})};
  whole.run();

  // Sums over both ranks, as the caller of the operations adds them.
  const auto add_over_ranks = [&](HostTensor PerLayerCase::*sums) {
    for (size_t i = 0; i < (whole.*sums).size(); ++i) {
      const double total = (parts[0].*sums)[i] + (parts[1].*sums)[i];
      CHECK(total == Approx((whole.*sums)[i]).epsilon(1e-6).margin(1e-6));
      for (PerLayerCase& part : parts) (part.*sums).set(i, total);
    }
  };
  for (PerLayerCase& part : parts) part.run_squares();
  add_over_ranks(&PerLayerCase::squares);
  for (PerLayerCase& part : parts) {
    part.forward();
    part.run_dots();
  }
  add_over_ranks(&PerLayerCase::dots);
  for (PerLayerCase& part : parts) part.backward();

  // What the formula and its differences give in this part's columns.
  PerLayerCase expected(DType::kF32, tokens, layers, width);
  PerLayerCase::assign(expected.inputs, reference_of(whole));
  PerLayerCase::assign(expected.d_projected, numeric.d_projected);
  PerLayerCase::assign(expected.d_looked_up, numeric.d_looked_up);
  PerLayerCase::assign(expected.d_weight, numeric.d_weight);
  for (const int rank : {0, 1}) {
    const Range columns = rank == 0 ? Range{0, cut} : Range{cut, width};
    const PerLayerCase of_formula = expected.part(columns), of_whole = whole.part(columns);
    PerLayerCase& part = parts[rank];
    require_rounded(part.inputs, of_formula.inputs.values());
    require_rounded(part.d_projected, of_formula.d_projected.values());
    require_rounded(part.d_looked_up, of_formula.d_looked_up.values());
    require_close(part.d_weight.values(), of_formula.d_weight.values(), 2e-6, 2e-6);

    // With the very sums of the whole, a part has the whole's bits.
    PerLayerCase again = PerLayerCase(dtype, tokens, layers, width).part(columns);
    PerLayerCase::assign(again.squares, whole.squares.values());
    PerLayerCase::assign(again.dots, whole.dots.values());
    again.forward();
    again.backward();
    CHECK(again.inputs.same_bits(of_whole.inputs));
    CHECK(again.d_projected.same_bits(of_whole.d_projected));
    CHECK(again.d_looked_up.same_bits(of_whole.d_looked_up));
    CHECK(again.d_weight.same_bits(of_whole.d_weight));
  }
}

TEST_CASE("per_layer_squares and per_layer_dots are this rank's terms") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = 20, layers = 3, tokens = 5;
  PerLayerCase c = PerLayerCase(dtype, tokens, layers, width).part({3, 14});
  c.run_squares();
  Values squares(15, 0.0), dots(15, 0.0);
  for (size_t i = 0; i < c.projected.size(); ++i) {
    squares[i / 11] += std::pow(static_cast<double>(kScale) * c.projected[i], 2);
  }
  require_close(c.squares.values(), squares, 1e-6, 0);

  PerLayerCase::assign(c.squares, random_values(15, 9, 1.0, 2.0));  // the other rank's terms among them
  c.run_dots();
  for (size_t i = 0; i < c.projected.size(); ++i) {
    const size_t pair = i / 11, token = pair / 3, layer = pair % 3;
    const double rms = std::sqrt(c.squares[pair] / static_cast<double>(width) + static_cast<double>(kEps));
    dots[pair] += c.d_inputs[(layer * 5 + token) * 11 + i % 11] * c.weight[i % 11] / std::sqrt(2.0) *
                  static_cast<double>(kScale) * c.projected[i] / rms;
  }
  require_close(c.dots.values(), dots, 2e-6, 2e-6);
}

TEST_CASE("per_layer_input_backward adds tokens to d_weight, and layers within a token, in ascending order") {
  const int64_t width = 37, layers = 3, tokens = 5;
  PerLayerCase whole(DType::kF32, tokens, layers, width);
  HostTensor ascending = whole.d_weight, descending = whole.d_weight, by_layer = whole.d_weight;
  whole.run();
  // One pair of a token and a layer, in a call of its own.
  const auto add_pair = [&](int64_t pair, const Tensor& d_weight) {
    const int64_t token = pair / layers, layer = pair % layers;
    PerLayerInputParams params = whole.params;
    params.layers = 1;
    const auto row = [&](const HostTensor& from, int64_t index, DType dtype, int64_t size) {
      HostTensor part(dtype, {1, size});
      for (size_t i = 0; i < part.size(); ++i) part.set(i, from[static_cast<size_t>(index * size) + i]);
      return part;
    };
    const HostTensor projected = row(whole.projected, pair, DType::kF32, width);
    const HostTensor squares = row(whole.squares, pair, DType::kF32, 1);
    const HostTensor dots = row(whole.dots, pair, DType::kF32, 1);
    const HostTensor d_inputs = row(whole.d_inputs, layer * tokens + token, DType::kF32, width);
    HostTensor d_projected = projected, d_looked_up = projected;
    per_layer_input_backward(kCpu, params, {projected, squares, whole.weight}, d_inputs, dots, d_projected, d_looked_up,
                             d_weight);
  };
  for (int64_t pair = 0; pair < tokens * layers; ++pair) {
    add_pair(pair, ascending);
    add_pair(tokens * layers - 1 - pair, descending);
    add_pair(pair % tokens * layers + pair / tokens, by_layer);
  }
  CHECK(whole.d_weight.same_bits(ascending));
  CHECK_FALSE(whole.d_weight.same_bits(descending));
  CHECK_FALSE(whole.d_weight.same_bits(by_layer));
}

TEST_CASE("a leaf of per_layer_squares and per_layer_dots has the bits that its columns have alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = 70, layers = 3, tokens = 5;
  const std::vector<Range> leaves = {{0, 32}, {32, 33}, {33, 65}, {65, 70}};
  PerLayerCase c(dtype, tokens, layers, width);
  const HostTensor no_sums(DType::kF32, {std::ssize(leaves), tokens, layers});
  HostTensor squares = no_sums, dots = no_sums, two_squares = no_sums, two_dots = no_sums;
  c.run_squares();
  per_layer_squares(kCpu, c.params, c.projected, squares, leaves);
  per_layer_dots(kCpu, c.params, c.projection(), c.d_inputs, dots, leaves);
  per_layer_squares(kTwoThreads, c.params, c.projected, two_squares, leaves);
  per_layer_dots(kTwoThreads, c.params, c.projection(), c.d_inputs, two_dots, leaves);
  CHECK(two_squares.same_bits(squares));
  CHECK(two_dots.same_bits(dots));
  HostTensor squares_alone = no_sums, dots_alone = no_sums;
  const size_t pairs = c.squares.size();
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    PerLayerCase part = c.part(leaves[leaf]);
    part.run_squares();
    for (size_t i = 0; i < pairs; ++i) squares_alone.set(leaf * pairs + i, part.squares[i]);
    PerLayerCase::assign(part.squares, c.squares.values());
    part.run_dots();
    for (size_t i = 0; i < pairs; ++i) dots_alone.set(leaf * pairs + i, part.dots[i]);
  }
  CHECK(squares.same_bits(squares_alone));
  CHECK(dots.same_bits(dots_alone));

  // The same columns cut elsewhere have other sums, and so has all of them as one leaf.
  HostTensor moved = no_sums, one(DType::kF32, {1, tokens, layers}), added = one;
  const std::vector<Range> cut_elsewhere = {{0, 31}, {31, 32}, {32, 64}, {64, 70}}, whole = {{0, width}};
  per_layer_squares(kCpu, c.params, c.projected, moved, cut_elsewhere);
  CHECK_FALSE(moved.same_bits(squares));
  per_layer_squares(kCpu, c.params, c.projected, one, whole);
  CHECK(one.values() == c.squares.values());
  for (size_t i = 0; i < pairs; ++i) {
    auto sum = static_cast<float>(squares[i]);
    for (size_t leaf = 1; leaf < leaves.size(); ++leaf) sum += static_cast<float>(squares[leaf * pairs + i]);
    added.set(i, static_cast<double>(sum));
  }
  CHECK_FALSE(added.same_bits(one));
  require_close(added.values(), one.values(), 1e-6, 0);
}

TEST_CASE("per_layer_input_backward: a block of tokens has the bits of a call of its own, whatever the columns") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = 37, layers = 3, tokens = 12, blocks = GENERATE(1, 3, 12), run = tokens / blocks;
  PerLayerCase whole(dtype, tokens, layers, width);
  whole.run_squares();
  whole.run_dots();
  const HostTensor before = random_tensor(DType::kF32, {blocks, width}, 6);
  HostTensor together = before, swapped = before, d_projected = whole.projected, d_looked_up = whole.projected;
  per_layer_input_backward(kCpu, whole.params, whole.projection(), whole.d_inputs, whole.dots, d_projected, d_looked_up,
                           together);
  // The tokens of a range, whose rows of d_inputs lie apart, one layer after another.
  const auto add_tokens = [&](const PerLayerCase& c, Range part, const Tensor& d_weight) {
    const auto rows = [&](const HostTensor& from) { return from.tensor().rows(part.begin, part.end); };
    HostTensor d_inputs(dtype, {layers * part.size(), c.w});
    for (int64_t row = 0; row < layers * part.size(); ++row) {
      const int64_t from = row / part.size() * tokens + part.begin + row % part.size();
      for (int64_t i = 0; i < c.w; ++i) {
        d_inputs.set(static_cast<size_t>(row * c.w + i), c.d_inputs[static_cast<size_t>(from * c.w + i)]);
      }
    }
    const HostTensor d_p(dtype, {part.size(), layers * c.w}), d_e = d_p;
    per_layer_input_backward(kCpu, c.params, {rows(c.projected), rows(c.squares), c.weight}, d_inputs, rows(c.dots),
                             d_p, d_e, d_weight);
  };
  const Range columns{5, 30};
  PerLayerCase narrow = whole.part(columns);
  PerLayerCase::assign(narrow.squares, whole.squares.values());
  PerLayerCase::assign(narrow.dots, whole.dots.values());
  HostTensor alone = before, of_part(DType::kF32, {blocks, columns.size()}), part_of_whole = of_part;
  const auto at = [&](size_t i) {
    return i / static_cast<size_t>(columns.size()) * static_cast<size_t>(width) + static_cast<size_t>(columns.begin) +
           i % static_cast<size_t>(columns.size());
  };
  for (size_t i = 0; i < of_part.size(); ++i) of_part.set(i, before[at(i)]);
  for (int64_t b = 0; b < blocks; ++b) {
    add_tokens(whole, {b * run, (b + 1) * run}, alone.tensor().rows(b, b + 1).view({width}));
    add_tokens(narrow, {b * run, (b + 1) * run}, of_part.tensor().rows(b, b + 1));
    for (int64_t t = (b + 1) * run; t-- > b * run;) add_tokens(whole, {t, t + 1}, swapped.tensor().rows(b, b + 1));
  }
  CHECK(together.same_bits(alone));
  CHECK(swapped.same_bits(alone) == (run == 1));
  for (size_t i = 0; i < of_part.size(); ++i) part_of_whole.set(i, together[at(i)]);
  CHECK(of_part.same_bits(part_of_whole));
}

TEST_CASE("per-layer inputs have the same bits on two threads") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  PerLayerCase one(dtype, 41, 3, 272), two(dtype, 41, 3, 272);
  REQUIRE(one.projected.tensor().numel() >= 2 * cpu::kMinWorkPerThread);
  one.run(kCpu);
  two.run(kTwoThreads);
  CHECK(two.squares.same_bits(one.squares));
  CHECK(two.inputs.same_bits(one.inputs));
  CHECK(two.dots.same_bits(one.dots));
  CHECK(two.d_projected.same_bits(one.d_projected));
  CHECK(two.d_looked_up.same_bits(one.d_looked_up));
  CHECK(two.d_weight.same_bits(one.d_weight));
}

TEST_CASE("per-layer inputs of no tokens and on meta") {
  PerLayerCase none(DType::kF32, 0, 3, 8);
  const HostTensor before = none.d_weight;
  none.run();
  CHECK(none.d_weight.same_bits(before));

  PerLayerCase c(DType::kBF16, 4, 3, 8);
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  const PerLayerProjection projection{meta(c.projected), meta(c.squares), meta(c.weight)};
  per_layer_squares(kMeta, c.params, meta(c.projected), meta(c.squares));
  per_layer_input_forward(kMeta, c.params, projection, meta(c.looked_up), meta(c.inputs));
  per_layer_dots(kMeta, c.params, projection, meta(c.d_inputs), meta(c.dots));
  per_layer_input_backward(kMeta, c.params, projection, meta(c.d_inputs), meta(c.dots), meta(c.d_projected),
                           meta(c.d_looked_up), meta(c.d_weight));
}

TEST_CASE("per-layer inputs of wrong operands") {
  PerLayerCase c(DType::kF32, 4, 3, 8);
  const HostTensor wrong(DType::kF32, {3, 4}), bf16(DType::kBF16, {8});
  const auto fault = [](const std::function<void()>& action) { return message_of(ErrorKind::kFault, action); };
  PerLayerInputParams five = c.params;
  five.layers = 5;
  CHECK(contains(fault([&] { per_layer_squares(kCpu, five, c.projected, c.squares); }),
                 "per_layer_squares: projected f32 (4, 24) for 5 layers of width 8"));
  CHECK(contains(fault([&] { per_layer_squares(kCpu, c.params, c.projected, wrong); }),
                 "squares is f32 (3, 4), expected f32 (4, 3)"));

  const auto forward = [&](const PerLayerProjection& projection, const Tensor& looked_up, const Tensor& inputs) {
    return fault([&] { per_layer_input_forward(kCpu, c.params, projection, looked_up, inputs); });
  };
  CHECK(
      contains(forward({c.projected, wrong, c.weight}, c.looked_up, c.inputs), "per_layer_input_forward: squares is"));
  CHECK(contains(forward({c.projected, c.squares, bf16}, c.looked_up, c.inputs), "weight is bf16 (8)"));
  CHECK(contains(forward(c.projection(), c.inputs, c.inputs), "looked_up is f32 (12, 8), expected f32 (4, 24)"));
  CHECK(contains(forward(c.projection(), c.looked_up, c.looked_up), "inputs is f32 (4, 24), expected f32 (12, 8)"));

  CHECK(contains(fault([&] { per_layer_dots(kCpu, c.params, c.projection(), c.projected, c.dots); }),
                 "per_layer_dots: d_inputs is f32 (4, 24)"));
  CHECK(contains(fault([&] { per_layer_dots(kCpu, c.params, c.projection(), c.d_inputs, wrong); }), "dots is"));

  const auto backward = [&](const Tensor& dots, const Tensor& d_projected, const Tensor& d_looked_up,
                            const Tensor& d_weight) {
    return fault([&] {
      per_layer_input_backward(kCpu, c.params, c.projection(), c.d_inputs, dots, d_projected, d_looked_up, d_weight);
    });
  };
  CHECK(contains(backward(wrong, c.d_projected, c.d_looked_up, c.d_weight), "per_layer_input_backward: dots is"));
  CHECK(contains(backward(c.dots, wrong, c.d_looked_up, c.d_weight), "d_projected is"));
  CHECK(contains(backward(c.dots, c.d_projected, wrong, c.d_weight), "d_looked_up is"));
  CHECK(contains(backward(c.dots, c.d_projected, c.d_looked_up, bf16), "d_weight is bf16 (8)"));
  CHECK(contains(backward(c.dots, c.d_projected, c.d_looked_up, HostTensor(DType::kF32, {3, 8})),
                 "d_weight has 3 blocks for 4 tokens"));

  const HostTensor two(DType::kF32, {2, 4, 3});
  const auto squares = [&](const std::vector<Range>& leaves, const Tensor& sums) {
    return fault([&] { per_layer_squares(kCpu, c.params, c.projected, sums, leaves); });
  };
  CHECK(squares({{0, 5}, {5, 8}}, two).empty());
  CHECK(contains(squares({{0, 8}}, two), "squares is f32 (2, 4, 3), expected f32 (1, 4, 3)"));
  CHECK(contains(squares({{0, 5}, {6, 8}}, two), "per_layer_squares: a leaf of columns [6, 8) after column 5"));
  CHECK(contains(squares({{1, 5}, {5, 8}}, two), "a leaf of columns [1, 5) after column 0"));
  CHECK(contains(squares({{0, 0}, {0, 8}}, two), "a leaf of columns [0, 0) after column 0"));
  CHECK(contains(squares({{0, 5}, {5, 9}}, two), "leaves end at column 9 of 8"));
  const std::vector<Range> short_of_end = {{0, 5}, {5, 7}};
  CHECK(contains(fault([&] { per_layer_dots(kCpu, c.params, c.projection(), c.d_inputs, two, short_of_end); }),
                 "per_layer_dots: leaves end at column 7 of 8"));
}

}  // namespace
}  // namespace invar::ops
