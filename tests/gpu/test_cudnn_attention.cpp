#include <algorithm>
#include <list>

#include "attention_case.h"
#include "device_tensor.h"
#include "ops/cuda/attention_backends.h"

namespace invar::test {
namespace {

const ops::AttentionBackend& cudnn() {
  return *ops::cuda::cudnn_attention();
}

// The operands as SelfAttention has them: q and k alone, v in the rows [q heads, k, v] of the projection, and d_q and
// d_v in such rows too. Buffers nobody fills are NaN.
class LayerCase {
 public:
  explicit LayerCase(const AttentionShape& shape) {
    const int64_t t = shape.tokens(), d = shape.head_dim, groups = shape.groups, per_group = shape.heads_per_group;
    const int64_t group_rows = (per_group + 2) * d;
    const auto query = [&] {
      return ops::HeadView{filled({t, groups * per_group * d}), groups, per_group, d, per_group * d, 0};
    };
    o.params = {shape.sequence, 1.5f / std::sqrt(static_cast<float>(d)), shape.window, Tensor()};
    o.q = query();
    o.d_out = query();
    o.k = {filled({t, groups * d}), groups, 1, d, d, 0};
    o.v = {filled({t, groups * group_rows}), groups, 1, d, group_rows, (per_group + 1) * d};
    o.out = o.q;
    o.out.buffer = unfilled({t, groups * per_group * d});
    const Tensor d_qkv = unfilled({t, groups * group_rows});
    o.d_q = {d_qkv, groups, per_group, d, group_rows, 0};
    o.d_v = {d_qkv, groups, 1, d, group_rows, (per_group + 1) * d};
    o.d_k = {unfilled({t, groups * d}), groups, 1, d, d, 0};
  }

  // Where nothing is to be written: the place of the raw keys' gradient.
  bool raw_d_k_untouched() const {
    ops::HeadView raw = o.d_v;
    raw.offset -= raw.head_dim;
    return std::ranges::all_of(AttentionCase::read(raw), [](double value) { return std::isnan(value); });
  }

  AttentionResult expected(const AttentionShape& shape) const {
    AttentionCase exact(shape, DType::kF64);
    AttentionCase::write(exact.q, AttentionCase::read(o.q));
    AttentionCase::write(exact.k, AttentionCase::read(o.k));
    AttentionCase::write(exact.v, AttentionCase::read(o.v));
    AttentionCase::write(exact.d_out, AttentionCase::read(o.d_out));
    exact.params = o.params;
    return run_attention(ops::reference_attention(), exact, 8);
  }

  AttentionOperands o;

 private:
  Tensor filled(const std::vector<int64_t>& shape) {
    return memory_.emplace_back(random_tensor(DType::kBF16, shape, static_cast<unsigned>(memory_.size()) + 1));
  }
  Tensor unfilled(const std::vector<int64_t>& shape) { return memory_.emplace_back(DType::kBF16, shape); }

  std::list<HostTensor> memory_;
};

// The results are in the operands' own memory too.
AttentionResult run_on_gpu(const AttentionOperands& host) {
  std::list<std::pair<Tensor, DeviceTensor>> copies;
  AttentionOperands o = host;
  for (ops::HeadView* view : o.views()) {
    const auto copy = std::ranges::find_if(copies, [&](const auto& c) { return c.first.raw() == view->buffer.raw(); });
    view->buffer = copy != copies.end() ? copy->second.tensor()
                                        : copies.emplace_back(view->buffer, DeviceTensor(view->buffer)).second.tensor();
  }
  const DeviceTensor lse(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  const DeviceTensor delta(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  cudnn().forward(gpu(), o.params, o.q, o.k, o.v, o.out, lse);
  cudnn().backward(gpu(), o.params, o.q, o.k, o.v, o.out, lse, o.d_out, delta, o.d_q, o.d_k, o.d_v);
  for (const auto& [buffer, copy] : copies) copy_across(gpu(), copy.tensor(), buffer);
  synchronize(gpu());
  return {AttentionCase::read(host.out), lse.host().values(), AttentionCase::read(host.d_q),
          AttentionCase::read(host.d_k), AttentionCase::read(host.d_v)};
}

TEST_CASE("cuDNN's attention on a layer's operands agrees with fp64, and again to the bit") {
  const std::vector<AttentionShape> shapes = {
      // samples, sequence, groups, heads per group, head_dim, window
      {1, 64, 1, 1, 64, 0},    {2, 256, 2, 2, 128, 0},   {3, 200, 4, 2, 128, 0},  {2, 512, 8, 2, 128, 110},
      {1, 300, 2, 1, 64, 300}, {2, 384, 2, 4, 256, 128}, {1, 1024, 1, 8, 256, 0}, {2, 130, 3, 3, 96, 50},
  };
  for (const AttentionShape& shape : shapes) {
    LayerCase c(shape);
    INFO(format("{} samples of {}, {} groups of {} heads of {}, window {}", shape.samples, shape.sequence, shape.groups,
                shape.heads_per_group, shape.head_dim, shape.window));
    REQUIRE(cudnn().refusal(c.o.params, c.o.q, c.o.k) == "");
    const AttentionResult actual = run_on_gpu(c.o);
    const AttentionResult expected = c.expected(shape);
    CHECK(relative_norm(actual.out, expected.out) < 4e-3);
    CHECK(relative_norm(actual.lse, expected.lse) < 2e-6);
    CHECK(relative_norm(actual.d_v, expected.d_v) < 8e-3);
    CHECK(relative_norm(actual.d_q, expected.d_q) < 8e-3);
    CHECK(relative_norm(actual.d_k, expected.d_k) < 8e-3);
    CHECK(c.raw_d_k_untouched());
    LayerCase again(shape);
    CHECK(same_bits(run_on_gpu(again.o), actual));
  }
}

TEST_CASE("a micro-batch that cuDNN's backward pass takes in parts has the bits of its samples alone") {
  const AttentionShape shape{6, 8192, 2, 2, 64};  // half a GiB of workspace a sample
  LayerCase whole(shape);
  const AttentionResult all = run_on_gpu(whole.o);
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    LayerCase alone(shape);
    const AttentionResult part = run_on_gpu(alone.o.sample(sample));
    const auto rows = [&](const std::vector<double>& values) {
      const auto size = std::ssize(values) / shape.samples;
      return std::vector<double>(values.begin() + sample * size, values.begin() + (sample + 1) * size);
    };
    CHECK(same_bits(part, {rows(all.out), rows(all.lse), rows(all.d_q), rows(all.d_k), rows(all.d_v)}));
  }
}

TEST_CASE("a sample that cuDNN's backward pass takes in parts has the bits of its groups alone") {
  const AttentionShape shape{2, 8192, 6, 4, 64};  // half a GiB of workspace a group
  LayerCase whole(shape);
  const AttentionResult all = run_on_gpu(whole.o);
  LayerCase apart(shape);
  for (int64_t group = 0; group < shape.groups; ++group) run_on_gpu(apart.o.group(group));
  CHECK(same_bits(AttentionCase::read(apart.o.out), all.out));
  CHECK(same_bits(AttentionCase::read(apart.o.d_q), all.d_q));
  CHECK(same_bits(AttentionCase::read(apart.o.d_k), all.d_k));
  CHECK(same_bits(AttentionCase::read(apart.o.d_v), all.d_v));
}

TEST_CASE("what cuDNN cannot do is refused with the reason") {
  const auto refusal = [](int64_t head_dim, DType dtype, int64_t extra, int64_t sequence = 128, float scale = 0.1f,
                          int64_t window = 0) {
    const Tensor buffer(nullptr, dtype, DeviceType::kCuda, {2 * sequence, 4 * head_dim + extra});
    const ops::HeadView q{buffer, 2, 2, head_dim, 2 * head_dim, 0}, k{buffer, 2, 1, head_dim, 2 * head_dim, 0};
    return cudnn().refusal({sequence, scale, window, Tensor()}, q, k);
  };
  CHECK(refusal(128, DType::kBF16, 0) == "");
  CHECK(contains(refusal(128, DType::kBF16, 0, 128, 0.0f), "it takes positive ones"));
  CHECK(contains(refusal(128, DType::kBF16, 0, 128, 0.1f, 25), "a window of 25 in 128"));
  CHECK(refusal(128, DType::kBF16, 0, 128, 0.1f, 26) == "");
  CHECK(contains(refusal(128, DType::kBF16, 0, 65536), "of workspace for a KV group"));
  CHECK(contains(refusal(128, DType::kF32, 0), "bf16 only"));
  CHECK(contains(refusal(512, DType::kBF16, 0), "at most 256"));
  CHECK(contains(refusal(12, DType::kBF16, 0), "multiple of 8"));
  CHECK(contains(refusal(128, DType::kBF16, 3), "multiples of 16 bytes"));
  const LayerCase c({1, 64, 1, 1, 64});
  ops::AttentionParams params = c.o.params;
  params.document_starts = HostTensor(DType::kI32, {64}).on(DeviceType::kMeta);
  CHECK(contains(cudnn().refusal(params, c.o.q, c.o.k), "documents"));
}

}  // namespace
}  // namespace invar::test
