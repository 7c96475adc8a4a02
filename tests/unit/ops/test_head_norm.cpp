#include "norm_reference.h"
#include "ops/cpu/parallel.h"
#include "ops/norm.h"

namespace invar::ops {
namespace {

using namespace invar::test;

TEST_CASE("the rope table holds cos and sin of fp32 angles") {
  const int64_t positions = 40000, head_dim = 6;
  HostTensor cos(DType::kF32, {positions, 3}), sin(DType::kF32, {positions, 3});
  fill_rope_table(kCpu, {cos, sin}, 1e6, head_dim, 3);
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
                              fill_rope_table(kCpu, {cos, sin}, 1e6, 8, 4);
                            }),
                 "rope cos is f32 (40000, 3)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              fill_rope_table(kCpu, {cos, sin}, 1e6, 7, 3);
                            }),
                 "even head_dim"));
  fill_rope_table(kMeta, {cos.on(DeviceType::kMeta), sin.on(DeviceType::kMeta)}, 1e6, head_dim, 3);
}

// A value in some hundred millions lies so near the middle of two floats that another rounding of the double shows.
TEST_CASE("rope tables of usual sizes are those of the math library") {
  struct Size {
    double theta;
    int64_t head_dim, rotated, positions;
  };
  const auto [theta, head_dim, rotated, positions] =
      GENERATE(values<Size>({{1e6, 128, 64, 8192}, {1e4, 256, 128, 4096}, {1e6, 512, 64, 4096}}));
  HostTensor cos(DType::kF32, {positions, head_dim / 2}), sin = cos;
  fill_rope_table(kCpu, {cos, sin}, theta, head_dim, rotated);
  const float* const cosine = cos.tensor().data<float>();
  const float* const sine = sin.tensor().data<float>();
  int64_t others = 0;
  for (int64_t pair = 0; pair < rotated; ++pair) {
    const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim);
    const auto frequency = static_cast<float>(std::pow(theta, exponent));
    for (int64_t position = 0; position < positions; ++position) {
      const auto angle = static_cast<double>(static_cast<float>(position) * frequency);
      const int64_t at = position * (head_dim / 2) + pair;
      others += cosine[at] != static_cast<float>(std::cos(angle));
      others += sine[at] != static_cast<float>(std::sin(angle));
    }
  }
  CHECK(others <= 2);
}

TEST_CASE("proportional rope: frequencies over the whole head, and pairs that stand still") {
  struct Expected {
    double theta;
    int64_t head_dim, rotated;
    std::vector<std::pair<size_t, double>> frequencies;
  };
  const auto c = GENERATE(values<Expected>({{1e6, 512, 64, {{0, 1.0}, {1, 0.9474635}, {63, 0.03337625}}},
                                            {1e4, 256, 128, {{0, 1.0}, {1, 0.930572}, {127, 1.0746078e-4}}}}));
  const auto half = static_cast<size_t>(c.head_dim / 2), rotated = static_cast<size_t>(c.rotated);
  HostTensor cos(DType::kF32, {5, c.head_dim / 2}), sin = cos;
  fill_rope_table(kCpu, {cos, sin}, c.theta, c.head_dim, c.rotated);
  for (const auto& [pair, frequency] : c.frequencies) {
    CHECK(std::atan2(sin[half + pair], cos[half + pair]) == Approx(frequency).epsilon(5e-7));
    const double angle = 4 * frequency;
    CHECK(cos[4 * half + pair] == Approx(std::cos(angle)).margin(3e-6));
    CHECK(sin[4 * half + pair] == Approx(std::sin(angle)).margin(3e-6));
  }
  for (size_t i = 0; i < cos.size(); ++i) {
    if (i % half >= rotated) CHECK((cos[i] == 1 && sin[i] == 0));
    if (i >= half && i % half < rotated) CHECK(sin[i] != 0);
  }
}

// Heads of a fused QKV row, with padding at the end of it. `which`: q, k or v of [q heads, k, v] per group.
struct HeadCase {
  static constexpr int64_t kGroups = 2, kQueries = 3;

  HeadCase(DType dtype_, int64_t tokens_, int64_t head_dim_, bool queries_, int64_t rotated_pairs)
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
    fill_rope_table(kCpu, rope, 100.0, head_dim, rotated_pairs);
  }
  HeadCase(DType dtype_, int64_t tokens_, int64_t head_dim_, bool queries_)
      : HeadCase(dtype_, tokens_, head_dim_, queries_, head_dim_ / 2) {}

  HeadNormRope params(int64_t sequence, bool with_weight = true, bool with_rope = true) const {
    return {with_weight ? weight.tensor() : Tensor(), kEps, with_rope ? &rope : nullptr, sequence, Tensor()};
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
    Values y = norm_reference(x, w ? *w : Values(width, 1.0), width);
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
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  const int64_t rotated_pairs = GENERATE(5, 2);
  HeadCase c(dtype, 7, 10, queries, rotated_pairs);
  const int64_t sequence = 5;  // positions 0..4, 0, 1
  const HeadNormRope params = c.params(sequence, with_weight, with_rope);
  const Values w = c.weight.values();

  const HostTensor before = c.out;
  head_norm_rope_forward(kCpu, params, c.view(c.in), c.view(c.out));
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
  for (size_t i = 0; i < elements.size(); ++i) {
    d_in[elements[i]] = numeric[i] + (write == Write::kAdd ? before[elements[i]] : 0.0);
  }
  const Values d_weight = plus(c.d_weight.values(), numeric_gradient([&](const Values& v) { return loss(x, v); }, w));
  HostTensor result = before;
  head_norm_rope_backward(kCpu, params, c.view(c.d_out), c.view(c.in), write, c.view(result),
                          with_weight ? c.d_weight.tensor() : Tensor());
  require_rounded(result, d_in);
  if (with_weight) require_close(c.d_weight.values(), d_weight, 2e-6, 2e-6);
}

TEST_CASE("pairs beyond the rotated ones come out of head_norm_rope as if there were no rope") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool with_weight = GENERATE(true, false);
  HeadCase c(dtype, 4, 512, false, 64);
  HostTensor still = c.out, turned = c.out;
  head_norm_rope_forward(kCpu, c.params(4, with_weight, false), c.view(c.in), c.view(still));
  head_norm_rope_forward(kCpu, c.params(4, with_weight, true), c.view(c.in), c.view(turned));
  const Values a = c.gather(still), b = c.gather(turned);
  size_t differ = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool rotated = i % 256 < 64, first_position = i < 2 * 512;
    if (!rotated || first_position) CHECK(a[i] == b[i]);
    differ += a[i] != b[i];
  }
  CHECK(differ > 3 * 2 * 128 * 9 / 10);  // positions 1 to 3 of two heads; in bf16 a small turn may round away
}

TEST_CASE("a head norm without a weight is one whose weight is 1") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  HeadCase c(dtype, 6, 36, false);
  for (size_t i = 0; i < c.weight.size(); ++i) c.weight.set(i, 1.0);
  HostTensor with = c.out, without = c.out;
  head_norm_rope_forward(kCpu, c.params(6), c.view(c.in), c.view(with));
  head_norm_rope_forward(kCpu, c.params(6, false), c.view(c.in), c.view(without));
  CHECK(without.same_bits(with));
  CHECK_FALSE(without.same_bits(c.out));
  HostTensor d_with = c.out, d_without = c.out;
  head_norm_rope_backward(kCpu, c.params(6), c.view(c.d_out), c.view(c.in), write, c.view(d_with), c.d_weight);
  head_norm_rope_backward(kCpu, c.params(6, false), c.view(c.d_out), c.view(c.in), write, c.view(d_without), Tensor());
  CHECK(d_without.same_bits(d_with));
}

TEST_CASE("head_norm_rope works in place") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  HeadCase c(dtype, 6, 36, true);
  HostTensor apart = c.in, in_place = c.in;
  head_norm_rope_forward(kCpu, c.params(6), c.view(c.in), c.view(apart));
  head_norm_rope_forward(kCpu, c.params(6), c.view(in_place), c.view(in_place));
  CHECK(in_place.same_bits(apart));
  CHECK_FALSE(in_place.same_bits(c.in));

  HostTensor d_apart = c.d_out, d_in_place = c.d_out, d_weight = c.d_weight;
  head_norm_rope_backward(kCpu, c.params(6), c.view(c.d_out), c.view(c.in), Write::kSet, c.view(d_apart), c.d_weight);
  head_norm_rope_backward(kCpu, c.params(6), c.view(d_in_place), c.view(c.in), Write::kSet, c.view(d_in_place),
                          d_weight);
  CHECK(d_in_place.same_bits(d_apart));
  CHECK(d_weight.same_bits(c.d_weight));
}

TEST_CASE("head_norm_rope: a document in a sample has the bits that it has alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool with_weight = GENERATE(true, false);
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  HeadCase c(dtype, 10, 36, true);
  const HostTensor starts(DType::kI32, {10}, {0, 0, 2, 2, 2, 0, 1, 1, 1, 4});  // two samples
  HostTensor packed = c.out, alone = c.out, whole = c.out;
  HostTensor d_packed = c.out, d_alone = c.out, d_whole = c.out;
  HostTensor w_packed = c.d_weight, w_alone = c.d_weight, w_whole = c.d_weight;
  const auto run = [&](const HeadNormRope& params, int64_t begin, int64_t end, const HostTensor& out,
                       const HostTensor& d_in, const HostTensor& d_weight) {
    const auto part = [&](const HostTensor& buffer) { return c.view(buffer.tensor().rows(begin, end)); };
    head_norm_rope_forward(kCpu, params, part(c.in), part(out));
    head_norm_rope_backward(kCpu, params, part(c.d_out), part(c.in), write, part(d_in),
                            with_weight ? d_weight.tensor() : Tensor());
  };
  HeadNormRope params = c.params(5, with_weight);
  run(params, 0, 10, whole, d_whole, w_whole);
  params.document_starts = starts;
  run(params, 0, 10, packed, d_packed, w_packed);
  for (const auto& [begin, end] : {std::pair{0, 2}, {2, 5}, {5, 6}, {6, 9}, {9, 10}}) {
    run(c.params(end - begin, with_weight), begin, end, alone, d_alone, w_alone);
  }
  CHECK(packed.same_bits(alone));
  CHECK(d_packed.same_bits(d_alone));
  CHECK(w_packed.same_bits(w_alone));
  CHECK_FALSE(packed.same_bits(whole));
  CHECK_FALSE(d_packed.same_bits(d_whole));
  CHECK(w_packed.same_bits(w_whole) != with_weight);

  params.document_starts = starts.tensor().rows(0, 9);
  const auto fault = [&] {
    return message_of(ErrorKind::kFault, [&] { run(params, 0, 10, whole, d_whole, w_whole); });
  };
  CHECK(contains(fault(), "head_norm_rope_forward: document_starts is i32 (9), expected i32 (10)"));
  params.document_starts = starts.on(DeviceType::kMeta);
  CHECK(contains(fault(), "i32 (10) on meta"));
}

TEST_CASE("head_norm_rope: the gradient of a head and a run of tokens has the bits that it has alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t blocks = GENERATE(1, 3, 12), tokens = 12, head_dim = 36, run = tokens / blocks;
  HeadCase c(dtype, tokens, head_dim, true);
  const HeadNormRope params = c.params(4, true, false);
  const HeadView all = c.view(c.in);
  const HostTensor before = random_tensor(DType::kF32, {all.heads(), blocks, head_dim}, 6);
  HostTensor together = before, two = before, alone = before, swapped = before, d_in = c.out, d_alone = c.out;
  head_norm_rope_backward(kCpu, params, c.view(c.d_out), all, Write::kSet, c.view(d_in), together);
  head_norm_rope_backward(kTwoThreads, params, c.view(c.d_out), all, Write::kSet, c.view(d_in), two);
  // One head and the tokens of a range, as if there were no others.
  const auto add_part = [&](int64_t head, Range part, const Tensor& d_weight) {
    const auto view = [&](const HostTensor& buffer) {
      return HeadView{buffer.tensor().rows(part.begin, part.end), 1, 1, head_dim, 0, all.index(0, head)};
    };
    head_norm_rope_backward(kCpu, params, view(c.d_out), view(c.in), Write::kSet, view(d_alone), d_weight);
  };
  for (int64_t sum = 0; sum < all.heads() * blocks; ++sum) {
    const auto row_of = [&](const HostTensor& sums) {
      return sums.tensor().view({all.heads() * blocks, head_dim}).rows(sum, sum + 1);
    };
    const int64_t head = sum / blocks, begin = sum % blocks * run, end = begin + run;
    add_part(head, {begin, end}, row_of(alone).view({head_dim}));
    for (int64_t t = end; t-- > begin;) add_part(head, {t, t + 1}, row_of(swapped).view({1, 1, head_dim}));
  }
  CHECK(two.same_bits(together));
  CHECK(together.same_bits(alone));
  CHECK(d_in.same_bits(d_alone));
  CHECK(swapped.same_bits(alone) == (run == 1));
}

// More rows than one block of the kernel.
TEST_CASE("head_norm_rope: two threads, and tokens in ascending order") {
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  HeadCase c(DType::kF32, 150, 130, true);
  const auto run = [&](const Stream& stream, int64_t begin, int64_t end, const Tensor& out, const Tensor& d_weight) {
    head_norm_rope_backward(stream, c.params(5), c.view(c.d_out.tensor().rows(begin, end)),
                            c.view(c.in.tensor().rows(begin, end)), write, c.view(out.rows(begin, end)), d_weight);
  };
  REQUIRE(256 * c.head_dim >= 2 * cpu::kMinWorkPerThread);
  HostTensor one = c.d_out, two = c.d_out, parts = c.d_out, swapped = c.d_out;
  HostTensor w_one = c.d_weight, w_two = c.d_weight, w_parts = c.d_weight, w_swapped = c.d_weight;
  run(kCpu, 0, 150, one, w_one);
  run(kTwoThreads, 0, 150, two, w_two);
  run(kCpu, 0, 75, parts, w_parts);
  run(kCpu, 75, 150, parts, w_parts);
  run(kCpu, 75, 150, swapped, w_swapped);
  run(kCpu, 0, 75, swapped, w_swapped);
  CHECK(two.same_bits(one));
  CHECK(parts.same_bits(one));  // 75 is a multiple of the sequence length
  CHECK(w_two.same_bits(w_one));
  CHECK(w_parts.same_bits(w_one));
  CHECK_FALSE(w_swapped.same_bits(w_one));

  HostTensor y_one = c.out, y_two = c.out;
  const bool with_weight = GENERATE(true, false);
  head_norm_rope_forward(kCpu, c.params(5, with_weight), c.view(c.in), c.view(y_one));
  head_norm_rope_forward(kTwoThreads, c.params(5, with_weight), c.view(c.in), c.view(y_two));
  CHECK(y_two.same_bits(y_one));
}

TEST_CASE("head_norm_rope of no tokens, on meta, and of wrong operands") {
  HeadCase none(DType::kBF16, 0, 8, false);
  const HostTensor before = none.d_weight;
  head_norm_rope_forward(kCpu, none.params(5), none.view(none.in), none.view(none.out));
  head_norm_rope_backward(kCpu, none.params(5), none.view(none.d_out), none.view(none.in), Write::kSet,
                          none.view(none.out), none.d_weight);
  CHECK(none.d_weight.same_bits(before));

  HeadCase c(DType::kF32, 4, 8, true);
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  const RopeTable rope{meta(c.cos), meta(c.sin)};
  const HeadNormRope on_meta{meta(c.weight), kEps, &rope, 5, Tensor()}, weightless{Tensor(), kEps, &rope, 5, Tensor()};
  head_norm_rope_forward(kMeta, on_meta, c.view(meta(c.in)), c.view(meta(c.out)));
  head_norm_rope_backward(kMeta, on_meta, c.view(meta(c.d_out)), c.view(meta(c.in)), Write::kAdd, c.view(meta(c.out)),
                          meta(c.d_weight));
  head_norm_rope_forward(kMeta, weightless, c.view(meta(c.in)), c.view(meta(c.out)));
  head_norm_rope_backward(kMeta, weightless, c.view(meta(c.d_out)), c.view(meta(c.in)), Write::kAdd,
                          c.view(meta(c.out)), Tensor());

  const auto forward = [&](const HeadView& in, const Tensor& weight, int64_t sequence, const HeadView& out) {
    return message_of(ErrorKind::kFault, [&] {
      head_norm_rope_forward(kCpu, {weight, kEps, &c.rope, sequence, Tensor()}, in, out);
    });
  };
  const auto backward = [&](bool with_weight, const HeadView& d_out, const Tensor& d_weight) {
    return message_of(ErrorKind::kFault, [&] {
      head_norm_rope_backward(kCpu, c.params(5, with_weight), d_out, c.view(c.in), Write::kSet, c.view(c.out),
                              d_weight);
    });
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
  CHECK(backward(true, c.view(c.d_out), c.d_weight).empty());
  CHECK(contains(backward(true, fewer, c.d_weight), "d_out holds 2 groups of 2 heads"));
  CHECK(contains(backward(true, c.view(c.d_out), c.cos), "d_weight is"));
  CHECK(contains(backward(true, c.view(c.d_out), Tensor()), "a weight and its gradient come together"));
  CHECK(contains(backward(false, c.view(c.d_out), c.d_weight), "a weight and its gradient come together"));
  const HostTensor three(DType::kF32, {6, 3, 8}), no_blocks(DType::kF32, {6, 0, 8}),
      fewer_heads(DType::kF32, {3, 2, 8});
  CHECK(
      contains(backward(true, c.view(c.d_out), three), "head_norm_rope_backward: d_weight has 3 blocks for 4 tokens"));
  CHECK(contains(backward(true, c.view(c.d_out), no_blocks), "0 blocks for 4 tokens"));
  CHECK(contains(backward(true, c.view(c.d_out), fewer_heads), "d_weight is f32 (3, 2, 8), expected f32 (6, 2, 8)"));
}

}  // namespace
}  // namespace invar::ops
