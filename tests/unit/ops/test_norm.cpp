#include "host_tensor.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/norm.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// Large enough to matter beside mean(x²) of the tests, so that its place in the formula is tested.
constexpr float kEps = 0.05f;

Values norm_reference(const Values& x, const Values& weight, size_t width) {
  Values y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    double squares = 0;
    for (size_t c = 0; c < width; ++c) squares += x[row + c] * x[row + c];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(kEps));
    for (size_t c = 0; c < width; ++c) y[row + c] = x[row + c] * rstd * weight[c];
  }
  return y;
}

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
  void backward(const Stream& stream) { rms_norm_backward(stream, d_y, x, weight, rstd, d_x, d_weight); }

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

TEST_CASE("rms_norm_backward is the derivative, added to what was there") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(1, 5, 67, 200);
  NormCase c(dtype, 4, width);
  c.forward(kCpu);
  const Values x = c.x.values(), weight = c.weight.values(), d_y = c.d_y.values();
  const auto loss = [&](const Values& x_, const Values& weight_) {
    return dot(norm_reference(x_, weight_, static_cast<size_t>(width)), d_y);
  };
  const Values d_x = plus(c.d_x.values(), numeric_gradient([&](const Values& v) { return loss(v, weight); }, x));
  const Values d_weight =
      plus(c.d_weight.values(), numeric_gradient([&](const Values& v) { return loss(x, v); }, weight));
  c.backward(kCpu);
  require_rounded(c.d_x, d_x);
  require_close(c.d_weight.values(), d_weight, 2e-6, 2e-6);
}

TEST_CASE("rms_norm_backward adds tokens to d_weight in ascending order") {
  NormCase whole(DType::kF32, 9, 53), parts(DType::kF32, 9, 53), swapped(DType::kF32, 9, 53);
  whole.forward(kCpu);
  whole.backward(kCpu);
  const auto run = [](NormCase& c, int64_t begin, int64_t end) {
    rms_norm_backward(kCpu, c.d_y.tensor().rows(begin, end), c.x.tensor().rows(begin, end), c.weight,
                      c.rstd.tensor().rows(begin, end), c.d_x.tensor().rows(begin, end), c.d_weight);
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

TEST_CASE("rms_norm gives the same bits on two threads") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  NormCase one(dtype, 129, 257), two(dtype, 129, 257);
  REQUIRE(one.x.tensor().numel() >= 2 * cpu::kMinWorkPerThread);
  one.forward(kCpu);
  one.backward(kCpu);
  two.forward(kTwoThreads);
  two.backward(kTwoThreads);
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
  rms_norm_backward(kMeta, meta(c.d_y), meta(c.x), meta(c.weight), meta(c.rstd), meta(c.d_x), meta(c.d_weight));

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
  CHECK(contains(
      message_of(ErrorKind::kFault, [&] { rms_norm_backward(kCpu, c.d_y, c.x, c.weight, c.rstd, c.d_x, bf16); }),
      "d_weight"));
}

TEST_CASE("the rope table holds cos and sin of fp32 angles") {
  const int64_t positions = 40000, head_dim = 6;
  HostTensor cos(DType::kF32, {positions, 3}), sin(DType::kF32, {positions, 3});
  fill_rope_table({cos, sin}, 1e6, head_dim);
  int differ = 0;
  for (size_t position = 0; position < 40000; position += 37) {
    for (size_t i = 0; i < 3; ++i) {
      const double exact_frequency = std::pow(1e6, -static_cast<double>(i) / 3.0);
      const float angle = static_cast<float>(position) * static_cast<float>(exact_frequency);
      CHECK(cos[position * 3 + i] == static_cast<double>(static_cast<float>(std::cos(static_cast<double>(angle)))));
      CHECK(sin[position * 3 + i] == static_cast<double>(static_cast<float>(std::sin(static_cast<double>(angle)))));
      differ += std::abs(cos[position * 3 + i] - std::cos(static_cast<double>(position) * exact_frequency)) > 1e-7;
    }
  }
  CHECK(differ > 0);  // rounding the angle shows: fp64 all the way would be another table
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              fill_rope_table({cos, sin}, 1e6, 8);
                            }),
                 "rope cos is f32 (40000, 3)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { fill_rope_table({cos, sin}, 1e6, 7); }), "even head_dim"));
  fill_rope_table({cos.on(DeviceType::kMeta), sin.on(DeviceType::kMeta)}, 1e6, head_dim);
}

// Heads of a fused QKV row, with padding at the end of it. `which`: q, k or v of [q heads, k, v] per group.
struct HeadCase {
  static constexpr int64_t kGroups = 2, kQueries = 3;

  HeadCase(DType dtype_, int64_t tokens_, int64_t head_dim_, bool queries_)
      : dtype(dtype_),
        tokens(tokens_),
        head_dim(head_dim_),
        queries(queries_),
        in(random_tensor(dtype, {tokens, row()}, 1, 2.0)),
        d_out(random_tensor(dtype, {tokens, row()}, 2)),
        out(random_tensor(dtype, {tokens, row()}, 3)),
        weight(random_tensor(dtype, {head_dim}, 4, 0.5, 1.0)),
        d_weight(random_tensor(DType::kF32, {head_dim}, 5)),
        cos(DType::kF32, {kTable, head_dim / 2}),
        sin(DType::kF32, {kTable, head_dim / 2}),
        rope{cos, sin} {
    fill_rope_table(rope, 100.0, head_dim);
  }

  int64_t row() const { return kGroups * (kQueries + 2) * head_dim + 3; }
  HeadView view(const Tensor& buffer) const {
    return {buffer,
            kGroups,
            queries ? kQueries : 1,
            head_dim,
            (kQueries + 2) * head_dim,
            queries ? 0 : kQueries * head_dim};
  }
  // Indices into a buffer of the elements of the view, head by head.
  std::vector<size_t> elements() const {
    std::vector<size_t> list;
    const int64_t heads = queries ? kQueries : 1;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t g = 0; g < kGroups; ++g) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < head_dim; ++d) {
            const int64_t head = g * (kQueries + 2) + (queries ? h : kQueries);
            list.push_back(static_cast<size_t>(t * row() + head * head_dim + d));
          }
        }
      }
    }
    return list;
  }
  Values gather(const HostTensor& buffer) const {
    Values out_values;
    for (size_t index : elements()) out_values.push_back(buffer[index]);
    return out_values;
  }
  // The op on gathered heads, in fp64.
  Values reference(const Values& x, const Values* w, bool rotate, int64_t sequence) const {
    const auto width = static_cast<size_t>(head_dim), half = width / 2;
    Values y = w ? norm_reference(x, *w, width) : x;
    const size_t heads = x.size() / width / static_cast<size_t>(tokens);
    if (!rotate) return y;
    for (size_t r = 0; r < x.size() / width; ++r) {
      const size_t angles = r / heads % static_cast<size_t>(sequence) * half;
      for (size_t i = 0; i < half; ++i) {
        double& a = y[r * width + i];
        double& b = y[r * width + half + i];
        const double c = cos[angles + i], s = sin[angles + i], a0 = a;
        a = a * c - b * s;
        b = b * c + a0 * s;
      }
    }
    return y;
  }

  static constexpr int64_t kTable = 8;
  DType dtype;
  int64_t tokens, head_dim;
  bool queries;
  HostTensor in, d_out, out, weight, d_weight, cos, sin;
  RopeTable rope;
};

TEST_CASE("head_norm_rope forward and backward are the formula and its derivative") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool with_weight = GENERATE(true, false), with_rope = GENERATE(true, false), queries = GENERATE(true, false);
  HeadCase c(dtype, 7, 10, queries);
  const int64_t sequence = 5;  // positions 0..4, 0, 1
  const Tensor weight = with_weight ? c.weight.tensor() : Tensor();
  const RopeTable* rope = with_rope ? &c.rope : nullptr;
  const Values w = c.weight.values();

  const HostTensor before = c.out;
  head_norm_rope_forward(kCpu, c.view(c.in), weight, kEps, rope, sequence, c.view(c.out));
  const Values x = c.gather(c.in), expected = c.reference(x, with_weight ? &w : nullptr, with_rope, sequence);
  Values everything = before.values();
  const std::vector<size_t> elements = c.elements();
  for (size_t i = 0; i < elements.size(); ++i) everything[elements[i]] = expected[i];
  require_rounded(c.out, everything);

  const Values d_out = c.gather(c.d_out);
  const auto loss = [&](const Values& x_, const Values& w_) {
    return dot(c.reference(x_, with_weight ? &w_ : nullptr, with_rope, sequence), d_out);
  };
  Values d_in = before.values();
  const Values numeric = numeric_gradient([&](const Values& v) { return loss(v, w); }, x);
  for (size_t i = 0; i < elements.size(); ++i) d_in[elements[i]] = numeric[i];
  const Values d_weight = plus(c.d_weight.values(), numeric_gradient([&](const Values& v) { return loss(x, v); }, w));
  HostTensor result = before;
  head_norm_rope_backward(kCpu, c.view(c.d_out), c.view(c.in), weight, kEps, rope, sequence, c.view(result),
                          with_weight ? c.d_weight.tensor() : Tensor());
  require_rounded(result, d_in);
  if (with_weight) require_close(c.d_weight.values(), d_weight, 2e-6, 2e-6);
}

TEST_CASE("head_norm_rope works in place") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  HeadCase c(dtype, 6, 36, true);
  HostTensor apart = c.in, in_place = c.in;
  head_norm_rope_forward(kCpu, c.view(c.in), c.weight, kEps, &c.rope, 6, c.view(apart));
  head_norm_rope_forward(kCpu, c.view(in_place), c.weight, kEps, &c.rope, 6, c.view(in_place));
  CHECK(in_place.same_bits(apart));
  CHECK_FALSE(in_place.same_bits(c.in));

  HostTensor d_apart = c.d_out, d_in_place = c.d_out, d_weight = c.d_weight;
  head_norm_rope_backward(kCpu, c.view(c.d_out), c.view(c.in), c.weight, kEps, &c.rope, 6, c.view(d_apart), c.d_weight);
  head_norm_rope_backward(kCpu, c.view(d_in_place), c.view(c.in), c.weight, kEps, &c.rope, 6, c.view(d_in_place),
                          d_weight);
  CHECK(d_in_place.same_bits(d_apart));
  CHECK(d_weight.same_bits(c.d_weight));
}

// More rows than one block of the kernel.
TEST_CASE("head_norm_rope: two threads, and tokens in ascending order") {
  HeadCase c(DType::kF32, 150, 130, true);
  const auto run = [&](const Stream& stream, int64_t begin, int64_t end, const Tensor& out, const Tensor& d_weight) {
    head_norm_rope_backward(stream, c.view(c.d_out.tensor().rows(begin, end)), c.view(c.in.tensor().rows(begin, end)),
                            c.weight, kEps, &c.rope, 5, c.view(out.rows(begin, end)), d_weight);
  };
  REQUIRE(256 * c.head_dim >= 2 * cpu::kMinWorkPerThread);
  HostTensor one = c.d_out, two = c.d_out, parts = c.d_out;
  HostTensor w_one = c.d_weight, w_two = c.d_weight, w_parts = c.d_weight, w_swapped = c.d_weight;
  run(kCpu, 0, 150, one, w_one);
  run(kTwoThreads, 0, 150, two, w_two);
  run(kCpu, 0, 75, parts, w_parts);
  run(kCpu, 75, 150, parts, w_parts);
  run(kCpu, 75, 150, parts, w_swapped);
  run(kCpu, 0, 75, parts, w_swapped);
  CHECK(two.same_bits(one));
  CHECK(parts.same_bits(one));  // 75 is a multiple of the sequence length
  CHECK(w_two.same_bits(w_one));
  CHECK(w_parts.same_bits(w_one));
  CHECK_FALSE(w_swapped.same_bits(w_one));

  HostTensor y_one = c.out, y_two = c.out;
  head_norm_rope_forward(kCpu, c.view(c.in), c.weight, kEps, &c.rope, 5, c.view(y_one));
  head_norm_rope_forward(kTwoThreads, c.view(c.in), c.weight, kEps, &c.rope, 5, c.view(y_two));
  CHECK(y_two.same_bits(y_one));
}

TEST_CASE("head_norm_rope of no tokens, on meta, and of wrong operands") {
  HeadCase none(DType::kBF16, 0, 8, false);
  const HostTensor before = none.d_weight;
  head_norm_rope_forward(kCpu, none.view(none.in), none.weight, kEps, &none.rope, 5, none.view(none.out));
  head_norm_rope_backward(kCpu, none.view(none.d_out), none.view(none.in), none.weight, kEps, &none.rope, 5,
                          none.view(none.out), none.d_weight);
  CHECK(none.d_weight.same_bits(before));

  HeadCase c(DType::kF32, 4, 8, true);
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  const RopeTable rope{meta(c.cos), meta(c.sin)};
  head_norm_rope_forward(kMeta, c.view(meta(c.in)), meta(c.weight), kEps, &rope, 5, c.view(meta(c.out)));
  head_norm_rope_backward(kMeta, c.view(meta(c.d_out)), c.view(meta(c.in)), meta(c.weight), kEps, &rope, 5,
                          c.view(meta(c.out)), meta(c.d_weight));

  const auto forward = [&](const HeadView& in, const Tensor& weight, int64_t sequence, const HeadView& out) {
    return message_of(ErrorKind::kFault,
                      [&] { head_norm_rope_forward(kCpu, in, weight, kEps, &c.rope, sequence, out); });
  };
  HeadView past = c.view(c.in);
  past.offset = 3 * c.head_dim;
  HeadView fewer = c.view(c.out);
  fewer.heads_per_group = 2;
  HeadView overlapping = c.view(c.in);
  overlapping.group_stride = c.head_dim;
  CHECK(forward(c.view(c.in), c.weight, 5, c.view(c.out)).empty());
  CHECK(contains(forward(past, c.weight, 5, c.view(c.out)), "end past the row"));
  CHECK(contains(forward(overlapping, c.weight, 5, c.view(c.out)), "apart but"));
  CHECK(contains(forward(c.view(c.in), c.weight, 5, fewer), "out holds 2 groups of 2 heads"));
  CHECK(contains(forward(c.view(c.in), c.cos, 5, c.view(c.out)), "weight is"));
  CHECK(contains(forward(c.view(c.in), c.weight, 9, c.view(c.out)), "sequences of 9"));
}

}  // namespace
}  // namespace invar::ops
