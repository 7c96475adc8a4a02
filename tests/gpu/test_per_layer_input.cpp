#include "device_tensor.h"
#include "ops/per_layer_input.h"

namespace invar::ops {
namespace {

using namespace invar::test;

const Stream kThreads(DeviceType::kCpu, 8);

struct Size {
  int64_t tokens, layers, w;
};

struct Results {
  HostTensor squares, inputs, dots, d_projected, d_looked_up, d_weight;
};

// A rank that holds w of twice as many columns.
struct PerLayerCase {
  PerLayerCase(DType dtype_, Size size)
      : dtype(dtype_),
        pairs(size.tokens * size.layers),
        w(size.w),
        by_token{size.tokens, size.layers * size.w},
        by_pair{size.tokens, size.layers},
        params{size.layers, 2 * size.w, 0.3f, 0.05f},
        projected(random_tensor(dtype, by_token, 1, 2.0)),
        looked_up(random_tensor(dtype, by_token, 2)),
        weight(random_tensor(dtype, {w}, 3, 0.5, 1.0)),
        d_inputs(random_tensor(dtype, {pairs, w}, 4)),
        d_weight(random_tensor(DType::kF32, {w}, 5)),
        all_squares(random_tensor(DType::kF32, by_pair, 6, 5.0, 12.0)),
        all_dots(random_tensor(DType::kF32, by_pair, 7, 3.0)) {}

  Results empty() const {
    return {HostTensor(DType::kF32, by_pair), HostTensor(dtype, {pairs, w}), HostTensor(DType::kF32, by_pair),
            HostTensor(dtype, by_token),      HostTensor(dtype, by_token),   d_weight};
  }
  Results cpu() const {
    Results out = empty();
    const PerLayerProjection projection{projected, all_squares, weight};
    per_layer_squares(kThreads, params, projected, out.squares);
    per_layer_input_forward(kThreads, params, projection, looked_up, out.inputs);
    per_layer_dots(kThreads, params, projection, d_inputs, out.dots);
    per_layer_input_backward(kThreads, params, projection, d_inputs, all_dots, out.d_projected, out.d_looked_up,
                             out.d_weight);
    return out;
  }
  Results on_gpu(bool in_place) const {
    const Results out = empty();
    const DeviceTensor p(projected), e(looked_up), gain(weight), d(d_inputs), s(all_squares), all(all_dots);
    const DeviceTensor squares(out.squares), inputs(out.inputs), dots(out.dots), d_p(out.d_projected),
        d_e(out.d_looked_up), d_gain(out.d_weight);
    const PerLayerProjection projection{p, s, gain};
    per_layer_squares(gpu(), params, p, squares);
    per_layer_input_forward(gpu(), params, projection, e, inputs);
    per_layer_dots(gpu(), params, projection, d, dots);
    const Tensor& into = in_place ? p.tensor() : d_p.tensor();
    per_layer_input_backward(gpu(), params, projection, d, all, into, d_e, d_gain);
    return {squares.host(), inputs.host(), dots.host(), in_place ? p.host() : d_p.host(), d_e.host(), d_gain.host()};
  }

  DType dtype;
  int64_t pairs, w;
  std::vector<int64_t> by_token, by_pair;
  PerLayerInputParams params;
  HostTensor projected, looked_up, weight, d_inputs, d_weight, all_squares, all_dots;
};

TEST_CASE("per-layer inputs on the GPU") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Size size = GENERATE(values<Size>({{0, 3, 8},
                                           {1, 1, 1},
                                           {5, 3, 11},
                                           {33, 4, 16},
                                           {65, 7, 37},
                                           {129, 5, 128},
                                           {300, 35, 256},
                                           {40, 3, 1032},
                                           {4096, 4, 256}}));
  CAPTURE(name_of(dtype), size.tokens, size.layers, size.w);
  const PerLayerCase c(dtype, size);
  const Results wanted = c.cpu(), actual = c.on_gpu(false), again = c.on_gpu(true);
  // The same fp32 operations, element by element.
  CHECK(actual.inputs.same_bits(wanted.inputs));
  CHECK(actual.d_projected.same_bits(wanted.d_projected));
  CHECK(actual.d_looked_up.same_bits(wanted.d_looked_up));
  // Sums in another order.
  require_close(actual.squares.values(), wanted.squares.values(), 1e-6, 0);
  require_close(actual.dots.values(), wanted.dots.values(), 1e-5, 1e-5);
  CHECK(relative_norm(actual.d_weight.values(), wanted.d_weight.values()) <= 1e-5);

  CHECK(again.squares.same_bits(actual.squares));
  CHECK(again.dots.same_bits(actual.dots));
  CHECK(again.d_weight.same_bits(actual.d_weight));
  CHECK(again.d_projected.same_bits(actual.d_projected));  // in projected's buffer
  CHECK(again.d_looked_up.same_bits(actual.d_looked_up));
}

// Columns [begin, end) of every row of `w` columns.
HostTensor columns_of(const HostTensor& from, int64_t w, Range columns, const std::vector<int64_t>& shape) {
  HostTensor out(from.tensor().dtype(), shape);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / columns.size(), column = static_cast<int64_t>(i) % columns.size();
    out.set(i, from[static_cast<size_t>(row * w + columns.begin + column)]);
  }
  return out;
}

TEST_CASE("per-layer sums on the GPU: a leaf has the bits that its columns have alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto leaves = GENERATE(values<std::vector<Range>>(
      {{{0, 64}, {64, 128}}, {{0, 33}, {33, 34}, {34, 98}, {98, 131}}, {{0, 8}, {8, 300}, {300, 308}}, {{0, 37}}}));
  const Size size{33, 3, leaves.back().end};
  const PerLayerCase c(dtype, size);
  const HostTensor no_sums(DType::kF32, {std::ssize(leaves), size.tokens, size.layers});
  HostTensor squares = no_sums, dots = no_sums;
  per_layer_squares(kThreads, c.params, c.projected, squares, leaves);
  per_layer_dots(kThreads, c.params, {c.projected, c.all_squares, c.weight}, c.d_inputs, dots, leaves);
  const DeviceTensor p(c.projected), gain(c.weight), d(c.d_inputs), all(c.all_squares);
  const DeviceTensor device_squares(no_sums), device_dots(no_sums), squares_alone(no_sums), dots_alone(no_sums);
  per_layer_squares(gpu(), c.params, p, device_squares, leaves);
  per_layer_dots(gpu(), c.params, {p, all, gain}, d, device_dots, leaves);
  require_close(device_squares.host().values(), squares.values(), 1e-6, 0);
  require_close(device_dots.host().values(), dots.values(), 1e-5, 1e-5);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const int64_t w = leaves[i].size(), leaf = static_cast<int64_t>(i);
    const DeviceTensor own_p(columns_of(c.projected, size.w, leaves[i], {size.tokens, size.layers * w}));
    const DeviceTensor own_d(columns_of(c.d_inputs, size.w, leaves[i], {c.pairs, w}));
    const DeviceTensor own_gain(columns_of(c.weight, size.w, leaves[i], {w}));
    const auto sum = [&](const DeviceTensor& sums) {
      return sums.tensor().rows(leaf, leaf + 1).view({size.tokens, size.layers});
    };
    per_layer_squares(gpu(), c.params, own_p, sum(squares_alone));
    per_layer_dots(gpu(), c.params, {own_p, all, own_gain}, own_d, sum(dots_alone));
  }
  CHECK(device_squares.host().same_bits(squares_alone.host()));
  CHECK(device_dots.host().same_bits(dots_alone.host()));
}

TEST_CASE("per_layer_input_backward on the GPU: blocks have the bits of calls of their own, whatever the columns") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t layers = 5, run = GENERATE(1, 64, 700), blocks = 3, tokens = run * blocks, w = 256;
  const PerLayerCase c(dtype, {tokens, layers, w});
  const HostTensor before = random_tensor(DType::kF32, {blocks, w}, 8);
  // A call for the tokens of a range and some columns, with the whole's sums over columns.
  const auto backward = [&](const Stream& stream, Range rows, Range columns, const HostTensor& d_weight) {
    HostTensor d_inputs(dtype, {layers * rows.size(), w});
    for (size_t i = 0; i < d_inputs.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / w, column = static_cast<int64_t>(i) % w;
      const int64_t from = row / rows.size() * tokens + rows.begin + row % rows.size();
      d_inputs.set(i, c.d_inputs[static_cast<size_t>(from * w + column)]);
    }
    const int64_t width = columns.size();
    const HostTensor own_d = columns_of(d_inputs, w, columns, {layers * rows.size(), width});
    const HostTensor p = columns_of(c.projected, w, columns, {tokens, layers * width});
    const HostTensor gain = columns_of(c.weight, w, columns, {width}), d_p(dtype, {rows.size(), layers * width});
    const auto part = [&](const Tensor& tensor) { return tensor.rows(rows.begin, rows.end); };
    if (stream.device() == DeviceType::kCpu) {
      HostTensor out = d_weight, d_e = d_p;
      per_layer_input_backward(stream, c.params, {part(p), part(c.all_squares), gain}, own_d, part(c.all_dots), d_p,
                               d_e, out);
      return out;
    }
    const DeviceTensor device_p(p), device_gain(gain), device_d(own_d), squares(c.all_squares), dots(c.all_dots);
    const DeviceTensor to_p(d_p), to_e(d_p), out(d_weight);
    per_layer_input_backward(stream, c.params, {part(device_p), part(squares), device_gain}, device_d, part(dots), to_p,
                             to_e, out);
    return out.host();
  };
  const HostTensor together = backward(gpu(), {0, tokens}, {0, w}, before);
  CHECK(relative_norm(together.values(), backward(kThreads, {0, tokens}, {0, w}, before).values()) <= 1e-5);
  for (int64_t b = 0; b < blocks; ++b) {
    for (const Range columns : {Range{0, w}, Range{0, 64}, Range{64, 96}, Range{100, 137}}) {
      const auto row = [&](const HostTensor& from) {
        const Values all = from.values();
        const HostTensor whole(DType::kF32, {w}, Values(all.begin() + b * w, all.begin() + (b + 1) * w));
        return columns_of(whole, w, columns, {columns.size()});
      };
      const HostTensor alone = backward(gpu(), {b * run, (b + 1) * run}, columns, row(before));
      CHECK(alone.same_bits(row(together)));
    }
  }
}

}  // namespace
}  // namespace invar::ops
