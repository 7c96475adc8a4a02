#include "like_cpu.h"
#include "ops/norm.h"

namespace invar::ops {
namespace {

using namespace invar::test;

constexpr float kEps = 1e-3f;

struct Shape {
  int64_t tokens, width;
};

// Rows of one and several warps, with idle lanes and without, wider than a block holds, and not of whole packs.
Shape any_shape() {
  return GENERATE(values<Shape>({{0, 1024},
                                 {1, 1},
                                 {3, 7},
                                 {5, 33},
                                 {2, 24},
                                 {33, 96},
                                 {40, 768},
                                 {1, 1024},
                                 {300, 1024},
                                 {901, 512},
                                 {4096, 1024},
                                 {2001, 2048},
                                 {517, 2560},
                                 {130, 4096},
                                 {600, 8192},
                                 {7, 16384},
                                 {9, 20000},
                                 {5001, 65}}));
}

TEST_CASE("rms_norm_forward on the GPU is the CPU's") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [tokens, width] = any_shape();
  const HostTensor x = random_tensor(dtype, {tokens, width}, 1, 2.0);
  const HostTensor weight = random_tensor(dtype, {width}, 2, 0.5, 1.0);
  HostTensor y(dtype, {tokens, width}), rstd(DType::kF32, {tokens});
  const DeviceTensor device_x(x), device_weight(weight), device_y(y), device_rstd(rstd), again(y);

  rms_norm_forward(kCpu, x, weight, kEps, y, rstd);
  rms_norm_forward(gpu(), device_x, device_weight, kEps, device_y, device_rstd);
  require_like_cpu(device_y.host(), y);
  require_like_cpu(device_rstd.host(), rstd);
  rms_norm_forward(gpu(), device_x, device_weight, kEps, again, device_rstd);
  CHECK(again.host().same_bits(device_y.host()));
}

TEST_CASE("a norm on the GPU refuses rows in packs that are not aligned, whose sums it would have to order otherwise") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = 256, odd = 65;
  const DeviceTensor flat{HostTensor(dtype, {width + 1})}, row{HostTensor(dtype, {1, width})};
  const DeviceTensor weight{HostTensor(dtype, {width})}, rstd{HostTensor(DType::kF32, {1})};
  const DeviceTensor d_weight{HostTensor(DType::kF32, {width})};
  const Tensor x = from_second(flat, {1, width});
  require_error(ErrorKind::kFault, {"rms_norm_forward", "not aligned to 16 bytes"},
                [&] { rms_norm_forward(gpu(), x, weight, kEps, row, rstd); });
  require_error(ErrorKind::kFault, {"rms_norm_backward", "not aligned to 16 bytes"},
                [&] { rms_norm_backward(gpu(), row, x, weight, rstd, Write::kSet, row, d_weight); });
  // Of odd width they are read one by one wherever they lie.
  rms_norm_forward(gpu(), from_second(flat, {1, odd}), weight.tensor().rows(0, odd), kEps, from_second(row, {1, odd}),
                   rstd);
  synchronize(gpu());
}

TEST_CASE("add_rms_norm_forward on the GPU is an add and a norm") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [tokens, width] = any_shape();
  const HostTensor a = random_tensor(dtype, {tokens, width}, 1), b = random_tensor(dtype, {tokens, width}, 2, 3.0);
  const HostTensor weight = random_tensor(dtype, {width}, 3, 0.5, 1.0);
  HostTensor sum(dtype, {tokens, width}), y = sum, rstd(DType::kF32, {tokens});
  const DeviceTensor device_a(a), device_b(b), device_weight(weight);
  const DeviceTensor device_sum(sum), device_y(y), device_rstd(rstd);

  add_rms_norm_forward(kCpu, a, b, weight, kEps, sum, y, rstd);
  add_rms_norm_forward(gpu(), device_a, device_b, device_weight, kEps, device_sum, device_y, device_rstd);
  CHECK(device_sum.host().same_bits(sum));
  require_like_cpu(device_y.host(), y);
  require_like_cpu(device_rstd.host(), rstd);

  // The sum may take an operand's place.
  add_rms_norm_forward(gpu(), device_a, device_b, device_weight, kEps, device_a, device_y, device_rstd);
  CHECK(device_a.host().same_bits(sum));
  require_like_cpu(device_y.host(), y);
}

TEST_CASE("rms_norm_backward on the GPU is the CPU's, and its bits are those of the shape") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  const auto [tokens, width] = any_shape();
  const HostTensor x = random_tensor(dtype, {tokens, width}, 1, 2.0), d_y = random_tensor(dtype, {tokens, width}, 2);
  const HostTensor weight = random_tensor(dtype, {width}, 3, 0.5, 1.0);
  const HostTensor rstd = random_tensor(DType::kF32, {tokens}, 4, 0.2, 0.9);
  const HostTensor d_x =
      write == Write::kAdd ? random_tensor(dtype, {tokens, width}, 5) : HostTensor(dtype, {tokens, width});
  const HostTensor d_weight = random_tensor(DType::kF32, {width}, 6);
  const DeviceTensor device_x(x), device_d_y(d_y), device_weight(weight), device_rstd(rstd);
  const DeviceTensor device_d_x(d_x), device_d_weight(d_weight), d_x_again(d_x), d_weight_again(d_weight);

  rms_norm_backward(kCpu, d_y, x, weight, rstd, write, d_x, d_weight);
  rms_norm_backward(gpu(), device_d_y, device_x, device_weight, device_rstd, write, device_d_x, device_d_weight);
  require_like_cpu(device_d_x.host(), d_x);
  require_sum_like_cpu(device_d_weight.host(), d_weight);

  const Tensor target = write == Write::kSet ? device_d_y.tensor() : d_x_again.tensor();
  rms_norm_backward(gpu(), device_d_y, device_x, device_weight, device_rstd, write, target, d_weight_again);
  CHECK((write == Write::kSet ? device_d_y : d_x_again).host().same_bits(device_d_x.host()));
  CHECK(d_weight_again.host().same_bits(device_d_weight.host()));
}

TEST_CASE("rms_norm_backward on the GPU: a block of tokens has the bits of a call of its own") {
  struct Blocked {
    int64_t run, blocks, width;
  };
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Runs of one and several parts, short and long, over packed rows and others.
  const auto [run, blocks, width] = GENERATE(values<Blocked>({{1, 5, 1024},
                                                              {64, 1, 96},
                                                              {64, 9, 4096},
                                                              {50, 3, 96},
                                                              {512, 2, 512},
                                                              {600, 3, 1024},
                                                              {64, 7, 33},
                                                              {700, 2, 65},
                                                              {24, 3, 20000}}));
  const int64_t tokens = run * blocks;
  const HostTensor x = random_tensor(dtype, {tokens, width}, 1, 2.0), d_y = random_tensor(dtype, {tokens, width}, 2);
  const HostTensor weight = random_tensor(dtype, {width}, 3, 0.5, 1.0);
  const HostTensor rstd = random_tensor(DType::kF32, {tokens}, 4, 0.2, 0.9);
  HostTensor d_x(dtype, {tokens, width}), d_weight = random_tensor(DType::kF32, {blocks, width}, 6);
  const DeviceTensor device_x(x), device_d_y(d_y), device_weight(weight), device_rstd(rstd);
  const DeviceTensor device_d_x(d_x), d_x_alone(d_x), together(d_weight), alone(d_weight);
  rms_norm_backward(kCpu, d_y, x, weight, rstd, Write::kSet, d_x, d_weight);
  rms_norm_backward(gpu(), device_d_y, device_x, device_weight, device_rstd, Write::kSet, device_d_x, together);
  for (int64_t b = 0; b < blocks; ++b) {
    const auto rows = [&](const Tensor& t) { return t.rows(b * run, (b + 1) * run); };
    rms_norm_backward(gpu(), rows(device_d_y), rows(device_x), device_weight, rows(device_rstd), Write::kSet,
                      rows(d_x_alone), alone.tensor().rows(b, b + 1).view({width}));
  }
  require_like_cpu(device_d_x.host(), d_x);
  require_sum_like_cpu(together.host(), d_weight);
  CHECK(together.host().same_bits(alone.host()));
  CHECK(device_d_x.host().same_bits(d_x_alone.host()));
}

}  // namespace
}  // namespace invar::ops
