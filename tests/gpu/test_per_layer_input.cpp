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

}  // namespace
}  // namespace invar::ops
