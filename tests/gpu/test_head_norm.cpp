#include "like_cpu.h"
#include "ops/norm.h"

namespace invar::ops {
namespace {

using namespace invar::test;

constexpr float kEps = 1e-3f;

struct HeadShape {
  int64_t tokens, head_dim, padding;  // elements at the end of a row
};

// Heads of fused QKV rows, [q heads, k, v] per group and padding, on both sides.
struct HeadCase {
  static constexpr int64_t kGroups = 2, kQueries = 3, kSequence = 32;

  HeadCase(DType dtype_, HeadShape shape, bool queries_, bool with_weight_)
      : tokens(shape.tokens),
        head_dim(shape.head_dim),
        queries(queries_),
        with_weight(with_weight_),
        in(random_tensor(dtype_, {tokens, kGroups * (kQueries + 2) * head_dim + shape.padding}, 1, 2.0)),
        d_out(random_tensor(dtype_, {in.tensor().dim(0), in.tensor().dim(1)}, 2)),
        out(random_tensor(dtype_, {in.tensor().dim(0), in.tensor().dim(1)}, 3)),
        weight(random_tensor(dtype_, {head_dim}, 4, 0.5, 1.0)),
        d_weight(random_tensor(DType::kF32, {head_dim}, 5)),
        cos(DType::kF32, {kSequence, head_dim / 2}),
        sin(DType::kF32, {kSequence, head_dim / 2}),
        starts(DType::kI32, {tokens}) {
    for (int64_t t = 0; t < tokens; ++t)
      starts.set(static_cast<size_t>(t), static_cast<double>(t % kSequence / 10 * 10));
    if (head_dim > 1) fill_rope_table(kCpu, {cos, sin}, 100.0, head_dim / 2 * 2, head_dim / 2);
  }

  HeadView view(const Tensor& buffer) const {
    return {buffer,
            kGroups,
            queries ? kQueries : 1,
            head_dim,
            (kQueries + 2) * head_dim,
            queries ? 0 : kQueries * head_dim};
  }

  int64_t tokens, head_dim;
  bool queries, with_weight;
  HostTensor in, d_out, out, weight, d_weight, cos, sin, starts;
};

struct DeviceHeadCase {
  explicit DeviceHeadCase(const HeadCase& c)
      : in(c.in),
        d_out(c.d_out),
        out(c.out),
        weight(c.weight),
        d_weight(c.d_weight),
        cos(c.cos),
        sin(c.sin),
        starts(c.starts) {}

  DeviceTensor in, d_out, out, weight, d_weight, cos, sin, starts;
};

enum class Turn { kNone, kSequence, kDocuments };

template <class Case>
HeadNormRope params_of(const HeadCase& shape, const Case& c, Turn turn, const RopeTable& table) {
  HeadNormRope params{shape.with_weight ? c.weight.tensor() : Tensor(), kEps, turn == Turn::kNone ? nullptr : &table,
                      HeadCase::kSequence};
  if (turn == Turn::kDocuments) params.document_starts = c.starts.tensor();
  return params;
}

// Forward and backward, each also in place and once more for the bits.
void check_like_cpu(const HeadCase& c, Turn turn, Write write) {
  const RopeTable table{c.cos, c.sin};
  const HeadNormRope params = params_of(c, c, turn, table);
  const DeviceHeadCase device(c), second(c);
  const RopeTable device_table{device.cos, device.sin};
  const HeadNormRope device_params = params_of(c, device, turn, device_table);
  const auto gradient_of = [&](const auto& of) { return c.with_weight ? of.d_weight.tensor() : Tensor(); };

  HostTensor out = c.out;
  head_norm_rope_forward(kCpu, params, c.view(c.in), c.view(out));
  head_norm_rope_forward(gpu(), device_params, c.view(device.in), c.view(device.out));
  require_like_cpu(device.out.host(), out);
  HostTensor in_place = c.in;
  head_norm_rope_forward(kCpu, params, c.view(in_place), c.view(in_place));
  head_norm_rope_forward(gpu(), device_params, c.view(second.in), c.view(second.in));
  require_like_cpu(second.in.host(), in_place);

  HostTensor d_in = c.out, d_weight = c.d_weight;
  const DeviceTensor device_d_in(c.out), d_in_again(c.out);
  head_norm_rope_backward(kCpu, params, c.view(c.d_out), c.view(c.in), write, c.view(d_in),
                          c.with_weight ? d_weight.tensor() : Tensor());
  head_norm_rope_backward(gpu(), device_params, c.view(device.d_out), c.view(device.in), write, c.view(device_d_in),
                          gradient_of(device));
  require_like_cpu(device_d_in.host(), d_in);
  if (c.with_weight) require_sum_like_cpu(device.d_weight.host(), d_weight);

  head_norm_rope_backward(gpu(), device_params, c.view(device.d_out), c.view(device.in), write, c.view(d_in_again),
                          gradient_of(second));
  CHECK(d_in_again.host().same_bits(device_d_in.host()));
  CHECK(second.d_weight.host().same_bits(device.d_weight.host()));

  HostTensor gradient = c.d_out;
  head_norm_rope_backward(kCpu, params, c.view(gradient), c.view(c.in), write, c.view(gradient), gradient_of(c));
  head_norm_rope_backward(gpu(), device_params, c.view(device.d_out), c.view(device.in), write, c.view(device.d_out),
                          gradient_of(device));
  require_like_cpu(device.d_out.host(), gradient);
}

TEST_CASE("head_norm_rope on the GPU is the CPU's") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto shape = GENERATE(values<HeadShape>({{0, 128, 0},
                                                 {1, 128, 0},
                                                 {37, 16, 8},
                                                 {37, 32, 0},
                                                 {37, 36, 3},
                                                 {37, 64, 8},
                                                 {21, 64, 16},
                                                 {37, 80, 0},
                                                 {37, 96, 0},
                                                 {37, 128, 8},
                                                 {21, 128, 24},
                                                 {37, 256, 0},
                                                 {37, 512, 0},
                                                 {9, 1024, 0}}));
  const bool queries = GENERATE(true, false), with_weight = GENERATE(true, false);
  const Turn turn = GENERATE(Turn::kNone, Turn::kSequence, Turn::kDocuments);
  const Write write = GENERATE(Write::kSet, Write::kAdd);
  check_like_cpu(HeadCase(dtype, shape, queries, with_weight), turn, write);
}

TEST_CASE("head_norm_rope on the GPU has odd heads, if they do not turn") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t head_dim = GENERATE(1, 7, 33, 65);
  check_like_cpu(HeadCase(dtype, {19, head_dim, 0}, true, true), Turn::kNone, Write::kAdd);
}

TEST_CASE("head_norm_rope on the GPU refuses heads in packs that are not aligned") {
  const HeadCase c(GENERATE(DType::kF32, DType::kBF16), {5, 64, 1}, true, true);
  const DeviceHeadCase device(c);
  const RopeTable table{device.cos, device.sin};
  const HeadNormRope params = params_of(c, device, Turn::kNone, table);
  require_error(ErrorKind::kFault, {"head_norm_rope_forward", "not all aligned to 16 bytes"},
                [&] { head_norm_rope_forward(gpu(), params, c.view(device.in), c.view(device.out)); });
}

TEST_CASE("head_norm_rope on the GPU has more heads than its blocks hold at once") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto shape = GENERATE(values<HeadShape>({{6000, 128, 0}, {9000, 64, 0}, {1200, 36, 0}}));
  check_like_cpu(HeadCase(dtype, shape, true, true), Turn::kDocuments, Write::kSet);
}

TEST_CASE("head_norm_rope on the GPU: the gradient of a head and a run of tokens has the bits that it has alone") {
  struct Blocked {
    int64_t run, blocks, head_dim;
  };
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [run, blocks, head_dim] = GENERATE(
      values<Blocked>({{1, 4, 128}, {64, 3, 128}, {64, 1, 16}, {300, 2, 64}, {96, 2, 512}, {64, 3, 36}, {200, 2, 30}}));
  HeadCase c(dtype, {run * blocks, head_dim, 0}, true, true);
  const HeadView all = c.view(c.in);
  HostTensor d_in = c.out, d_weight = random_tensor(DType::kF32, {all.heads(), blocks, head_dim}, 6);
  const DeviceHeadCase device(c);
  const DeviceTensor device_d_in(c.out), d_in_alone(c.out), together(d_weight), alone(d_weight);
  const RopeTable table{c.cos, c.sin}, device_table{device.cos, device.sin};
  const HeadNormRope params = params_of(c, c, Turn::kNone, table);
  const HeadNormRope device_params = params_of(c, device, Turn::kNone, device_table);
  head_norm_rope_backward(kCpu, params, c.view(c.d_out), all, Write::kSet, c.view(d_in), d_weight);
  head_norm_rope_backward(gpu(), device_params, c.view(device.d_out), c.view(device.in), Write::kSet,
                          c.view(device_d_in), together);
  require_like_cpu(device_d_in.host(), d_in);
  require_sum_like_cpu(together.host(), d_weight);
  // One head and one run, as if there were no others.
  for (int64_t sum = 0; sum < all.heads() * blocks; ++sum) {
    const int64_t head = sum / blocks, begin = sum % blocks * run;
    const auto view = [&](const Tensor& buffer) {
      return HeadView{buffer.rows(begin, begin + run), 1, 1, head_dim, 0, all.index(0, head)};
    };
    const Tensor row = alone.tensor().view({all.heads() * blocks, head_dim}).rows(sum, sum + 1);
    head_norm_rope_backward(gpu(), device_params, view(device.d_out), view(device.in), Write::kSet, view(d_in_alone),
                            row.view({1, 1, head_dim}));
  }
  CHECK(together.host().same_bits(alone.host()));
  CHECK(device_d_in.host().same_bits(d_in_alone.host()));
}

}  // namespace
}  // namespace invar::ops
