#include "norm_reference.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/norm.h"

namespace invar::ops {
namespace {

using namespace invar::test;

struct NormCase {
  NormCase(DType dtype, int64_t tokens, int64_t width)
      : x(random_tensor(dtype, {tokens, width}, 1, 2.0)),
        weight(random_tensor(dtype, {width}, 2, 0.5, 1.0)),
        d_y(random_tensor(dtype, {tokens, width}, 3)),
        d_x(random_tensor(dtype, {tokens, width}, 4)),
        d_weight(random_tensor(DType::kF32, {width}, 5)),
        y(dtype, {tokens, width}),
        rstd(DType::kF32, {tokens}) {}

  void forward(const Stream& stream) { rms_norm_forward(stream, x, weight, kEps, y, rstd); }
  void backward(const Stream& stream, Write write = Write::kAdd) {
    rms_norm_backward(stream, d_y, x, weight, rstd, write, d_x, d_weight);
  }

  HostTensor x, weight, d_y, d_x, d_weight, y, rstd;
};

TEST_CASE("lane_sum adds every term once, in an order of its own") {
  for (int64_t n : {0, 1, 15, 16, 17, 33, 4095, 4096, 4097, 10000}) {
    const float total = cpu::lane_sum(n, [](int64_t i, float sum) { return sum + static_cast<float>(i % 7 + 1); });
    double expected = 0;
    for (int64_t i = 0; i < n; ++i) expected += static_cast<double>(i % 7 + 1);
    CHECK(static_cast<double>(total) == expected);  // integers: exact in any order
  }
  // Lane 0 is (1 + 2^-24) + 2^-24 = 1; an ordinary sum with the two small terms together would be above 1.
  Values terms(33, 0.0);
  terms[0] = 1.0;
  terms[16] = terms[32] = 0x1p-24;
  const auto sum = [&] {
    return cpu::lane_sum(33, [&](int64_t i, float s) { return s + static_cast<float>(terms[static_cast<size_t>(i)]); });
  };
  CHECK(sum() == 1.0f);
  std::swap(terms[32], terms[31]);  // another lane
  std::swap(terms[16], terms[15]);
  CHECK(sum() > 1.0f);
}

TEST_CASE("rms_norm_forward is the formula") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(1, 5, 16, 67, 4100);
  NormCase c(dtype, 3, width);
  c.forward(kCpu);
  require_rounded(c.y, norm_reference(c.x.values(), c.weight.values(), static_cast<size_t>(width)));
  for (size_t t = 0; t < 3; ++t) {
    double squares = 0;
    for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
      squares += std::pow(c.x[t * static_cast<size_t>(width) + i], 2);
    }
    const double expected = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(kEps));
    CHECK(std::abs(c.rstd[t] - expected) <= 1e-6 * expected);
  }
}

TEST_CASE("rms_norm_backward is the derivative, added to what was there or written") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Write write = GENERATE(Write::kAdd, Write::kSet);
  const int64_t width = GENERATE(1, 5, 67, 200);
  NormCase c(dtype, 4, width);
  c.forward(kCpu);
  const Values x = c.x.values(), weight = c.weight.values(), d_y = c.d_y.values();
  const auto loss = [&](const Values& x_, const Values& weight_) {
    return dot(norm_reference(x_, weight_, static_cast<size_t>(width)), d_y);
  };
  Values d_x = numeric_gradient([&](const Values& v) { return loss(v, weight); }, x);
  if (write == Write::kAdd) d_x = plus(c.d_x.values(), d_x);
  const Values d_weight =
      plus(c.d_weight.values(), numeric_gradient([&](const Values& v) { return loss(x, v); }, weight));
  c.backward(kCpu, write);
  require_rounded(c.d_x, d_x);
  require_close(c.d_weight.values(), d_weight, 2e-6, 2e-6);
}

TEST_CASE("rms_norm_backward writes over d_y's buffer, and reads nothing from where it writes") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(1, 67, 200);
  NormCase apart(dtype, 4, width), in_place(dtype, 4, width);
  apart.forward(kCpu);
  in_place.forward(kCpu);
  apart.backward(kCpu, Write::kSet);
  HostTensor d_x(dtype, {4, width}), d_weight = in_place.d_weight;
  rms_norm_backward(kCpu, in_place.d_y, in_place.x, in_place.weight, in_place.rstd, Write::kSet, d_x, d_weight);
  CHECK(d_x.same_bits(apart.d_x));  // NaN before
  CHECK(d_weight.same_bits(apart.d_weight));
  rms_norm_backward(kCpu, in_place.d_y, in_place.x, in_place.weight, in_place.rstd, Write::kSet, in_place.d_y,
                    in_place.d_weight);
  CHECK(in_place.d_y.same_bits(apart.d_x));
  CHECK(in_place.d_weight.same_bits(apart.d_weight));
}

TEST_CASE("rms_norm_backward adds tokens to d_weight in ascending order") {
  NormCase whole(DType::kF32, 9, 53), parts(DType::kF32, 9, 53), swapped(DType::kF32, 9, 53);
  whole.forward(kCpu);
  whole.backward(kCpu);
  const auto run = [](NormCase& c, int64_t begin, int64_t end) {
    rms_norm_backward(kCpu, c.d_y.tensor().rows(begin, end), c.x.tensor().rows(begin, end), c.weight,
                      c.rstd.tensor().rows(begin, end), Write::kAdd, c.d_x.tensor().rows(begin, end), c.d_weight);
  };
  parts.forward(kCpu);
  run(parts, 0, 4);
  run(parts, 4, 9);
  swapped.forward(kCpu);
  run(swapped, 4, 9);
  run(swapped, 0, 4);
  CHECK(parts.d_x.same_bits(whole.d_x));
  CHECK(parts.d_weight.same_bits(whole.d_weight));
  CHECK_FALSE(swapped.d_weight.same_bits(whole.d_weight));
}

TEST_CASE("rms_norm_backward: a block of tokens has the bits of a call of its own") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t tokens = 24, width = 53, blocks = GENERATE(1, 2, 3, 24), run = tokens / blocks;
  NormCase c(dtype, tokens, width);
  c.forward(kCpu);
  const HostTensor before = random_tensor(DType::kF32, {blocks, width}, 6);
  HostTensor together = before, threads = before, alone = before, d_x = c.d_x;
  const auto backward = [&](const Stream& stream, Range part, const Tensor& d_weight) {
    const auto rows = [&](const HostTensor& t) { return t.tensor().rows(part.begin, part.end); };
    rms_norm_backward(stream, rows(c.d_y), rows(c.x), c.weight, rows(c.rstd), Write::kSet, rows(d_x), d_weight);
  };
  backward(kCpu, {0, tokens}, together);
  backward(Stream(DeviceType::kCpu, 5), {0, tokens}, threads);
  for (int64_t b = 0; b < blocks; ++b) {
    backward(kCpu, {b * run, (b + 1) * run}, alone.tensor().rows(b, b + 1).view({width}));
  }
  CHECK(together.same_bits(alone));
  CHECK(threads.same_bits(alone));
  // Tokens of a run in another order have other bits; a run of one token has no order.
  HostTensor swapped = before;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t t = (b + 1) * run; t-- > b * run;) backward(kCpu, {t, t + 1}, swapped.tensor().rows(b, b + 1));
  }
  CHECK(swapped.same_bits(alone) == (run == 1));
}

TEST_CASE("rms_norm gives the same bits on two threads") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Write write = GENERATE(Write::kAdd, Write::kSet);
  NormCase one(dtype, 129, 257), two(dtype, 129, 257);
  REQUIRE(one.x.tensor().numel() >= 2 * cpu::kMinWorkPerThread);
  one.forward(kCpu);
  one.backward(kCpu, write);
  two.forward(kTwoThreads);
  two.backward(kTwoThreads, write);
  CHECK(two.y.same_bits(one.y));
  CHECK(two.rstd.same_bits(one.rstd));
  CHECK(two.d_x.same_bits(one.d_x));
  CHECK(two.d_weight.same_bits(one.d_weight));
}

TEST_CASE("rms_norm of no tokens, on meta, and of wrong operands") {
  NormCase none(DType::kF32, 0, 8);
  const HostTensor before = none.d_weight;
  none.forward(kCpu);
  none.backward(kCpu);
  CHECK(none.d_weight.same_bits(before));

  NormCase c(DType::kF32, 3, 8);
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  rms_norm_forward(kMeta, meta(c.x), meta(c.weight), kEps, meta(c.y), meta(c.rstd));
  rms_norm_backward(kMeta, meta(c.d_y), meta(c.x), meta(c.weight), meta(c.rstd), Write::kSet, meta(c.d_x),
                    meta(c.d_weight));

  const HostTensor narrow(DType::kF32, {7}), bf16(DType::kBF16, {3, 8});
  const auto forward = [&](const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& y) {
    return message_of(ErrorKind::kFault, [&] { rms_norm_forward(stream, x, weight, kEps, y, c.rstd); });
  };
  CHECK(contains(forward(kCpu, c.x, narrow, c.y), "rms_norm_forward: weight is f32 (7), expected f32 (8)"));
  CHECK(contains(forward(kCpu, c.x, c.weight, bf16), "y is bf16 (3, 8), expected f32 (3, 8)"));
  CHECK(contains(forward(kMeta, meta(c.x), meta(narrow), meta(c.y)), "weight is f32 (7)"));
  CHECK(contains(forward(kCpu, meta(c.x), c.weight, c.y), "on meta, but the stream is on cpu"));
  const auto cuda = [](const HostTensor& t) { return t.on(DeviceType::kCuda); };
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              rms_norm_forward(Stream(DeviceType::kCuda), cuda(c.x), cuda(c.weight), kEps, cuda(c.y),
                                               cuda(c.rstd));
                            }),
                 "built without CUDA"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] { rms_norm_backward(kCpu, c.d_y, c.x, c.weight, c.rstd, Write::kAdd, c.d_x, bf16); }),
                 "d_weight"));
  const HostTensor two(DType::kF32, {2, 8}), three(DType::kF32, {3, 7}), no_blocks(DType::kF32, {0, 8});
  const auto backward = [&](const Tensor& d_weight) {
    return message_of(ErrorKind::kFault,
                      [&] { rms_norm_backward(kCpu, c.d_y, c.x, c.weight, c.rstd, Write::kSet, c.d_x, d_weight); });
  };
  CHECK(contains(backward(two), "rms_norm_backward: d_weight has 2 blocks for 3 tokens"));
  CHECK(contains(backward(no_blocks), "d_weight has 0 blocks for 3 tokens"));
  CHECK(contains(backward(three), "d_weight is f32 (3, 7), expected f32 (3, 8)"));
}

}  // namespace
}  // namespace invar::ops
