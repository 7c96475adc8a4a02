#include <algorithm>
#include <array>
#include <list>
#include <memory>

#include "attention_case.h"
#include "device_tensor.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/cudnn_proof.h"
#include "ops/cuda/repeated_group.h"
#include "ops/proofs.h"

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
// On a stream of its own in invariant numerics, else fast.
AttentionResult run_on_gpu(const AttentionOperands& host, const Stream& stream = gpu()) {
  std::list<std::pair<Tensor, DeviceTensor>> copies;
  AttentionOperands o = host;
  for (ops::HeadView* view : o.views()) {
    const auto copy = std::ranges::find_if(copies, [&](const auto& c) { return c.first.raw() == view->buffer.raw(); });
    view->buffer = copy != copies.end() ? copy->second.tensor()
                                        : copies.emplace_back(view->buffer, DeviceTensor(view->buffer)).second.tensor();
  }
  const DeviceTensor lse(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  const DeviceTensor delta(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  synchronize(gpu());  // they are copied in its order
  o.params.numerics.invariant = &stream.cuda() != &gpu().cuda();
  cudnn().forward(stream, o.params, o.q, o.k, o.v, o.out, lse);
  cudnn().backward(stream, o.params, o.q, o.k, o.v, o.out, lse, o.d_out, delta, o.d_q, o.d_k, o.d_v);
  synchronize(stream);
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

TEST_CASE("each plan in invariant numerics is proved, once, and leaves no trace") {
  const std::vector<AttentionShape> shapes = {
      // samples, sequence, groups, heads per group, head_dim, window
      {4, 1024, 8, 2, 128, 0}, {3, 200, 4, 2, 128, 0},  {2, 512, 8, 2, 128, 110}, {2, 384, 2, 4, 256, 128},
      {2, 130, 3, 3, 96, 50},  {1, 1024, 1, 8, 256, 0}, {1, 64, 1, 1, 64, 0},     {2, 8192, 6, 4, 64, 0},
  };
  for (const AttentionShape& shape : shapes) {
    INFO(format("{} samples of {}, {} groups of {} heads of {}, window {}", shape.samples, shape.sequence, shape.groups,
                shape.heads_per_group, shape.head_dim, shape.window));
    LayerCase fast(shape), proved(shape), again(shape);
    const AttentionResult expected = run_on_gpu(fast.o);
    const Stream stream = make_cuda_stream(0);
    CHECK(same_bits(run_on_gpu(proved.o, stream), expected));
    CHECK(proved.raw_d_k_untouched());
    const ops::Proofs proofs = ops::proofs(stream);
    CHECK(proofs.attention_plans >= 2);  // more if backward goes in unequal parts
    CHECK(proofs.seconds > 0);
    const ops::AttentionParams& params = proved.o.params;
    const int64_t planned = ops::attention_proof_bytes(
        params, proved.o.q, {proved.o.q, proved.o.k, proved.o.v, proved.o.out, proved.o.d_out});
    CHECK(proofs.most_bytes <= planned);
    CHECK(proofs.most_bytes > planned / 3);
    CHECK(same_bits(run_on_gpu(again.o, stream), expected));
    CHECK(ops::proofs(stream).attention_plans == proofs.attention_plans);
    LayerCase parts(shape);
    run_on_gpu(parts.o.sample(shape.samples - 1).group(shape.groups - 1), stream);
    const bool another = shape.samples * shape.groups > 1;
    CHECK((ops::proofs(stream).attention_plans > proofs.attention_plans) == another);
  }
  CHECK(ops::proofs(gpu()).attention_plans == 0);
}

TEST_CASE("a plan for groups that see the same keys is proved, in the memory that was planned") {
  const AttentionShape shape{2, 256, 6, 1, 128, 0};
  LayerCase copied(shape), shared(shape);
  const Stream stream = make_cuda_stream(0);
  for (ops::HeadView* view : {&shared.o.k, &shared.o.v}) view->group_stride = 0;
  for (const auto& [view, of] : {std::pair(copied.o.k, shared.o.k), std::pair(copied.o.v, shared.o.v)}) {
    AttentionCase::write(view, AttentionCase::read(of));
  }
  CHECK(same_bits(run_on_gpu(shared.o, stream), run_on_gpu(copied.o)));
  const ops::Proofs proofs = ops::proofs(stream);
  CHECK(proofs.attention_plans == 2);
  const AttentionOperands& o = shared.o;
  CHECK(proofs.most_bytes <= ops::attention_proof_bytes(o.params, o.q, {o.q, o.k, o.v, o.out, o.d_out}));
}

// One KV group of one sample as a proof has it: its operands side by side.
struct MadeUp {
  explicit MadeUp(const AttentionShape& shape)
      : params{shape.sequence, 1.0f / std::sqrt(static_cast<float>(shape.head_dim)), shape.window, Tensor()} {
    const int64_t d = shape.head_dim;
    for (size_t i = 0; i < memory.size(); ++i) {
      const bool of_keys = i == 1 || i == 2 || i == 6 || i == 7;
      const int64_t heads = of_keys ? 1 : shape.heads_per_group;
      memory[i] = std::make_unique<DeviceTensor>(HostTensor(DType::kBF16, {shape.sequence, heads * d}));
      views[i] = {memory[i]->tensor(), 1, heads, d, heads * d, 0};
    }
    for (const size_t i : {0, 1, 2, 4}) {
      ops::cuda::fill_group(gpu().cuda(), memory[i]->tensor().data<BF16>(), memory[i]->tensor().numel(), i + 1,
                            i == 1 ? -1 : 0);
    }
  }

  void run(const ops::AttentionBackend& backend) const {
    const auto& [q, k, v, out, d_out, d_q, d_k, d_v] = views;
    const HostTensor none(DType::kF32, {q.tokens(), q.heads()});
    const DeviceTensor lse(none), delta(none);
    backend.forward(gpu(), params, q, k, v, out, lse);
    backend.backward(gpu(), params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    synchronize(gpu());
  }

  ops::AttentionParams params;
  std::array<std::unique_ptr<DeviceTensor>, 8> memory;
  std::array<ops::HeadView, 8> views;
};

TEST_CASE("another order of sums shows on the numbers of an attention proof") {
  const AttentionShape shape = GENERATE(values<AttentionShape>({{1, 512, 1, 2, 128, 0}, {1, 1024, 1, 1, 64, 300}}));
  const MadeUp by_cudnn(shape), by_tiles(shape);
  by_cudnn.run(cudnn());
  by_tiles.run(ops::cuda::tiled_attention());
  for (const size_t i : {0, 1, 2, 4}) {
    CHECK(by_cudnn.memory[i]->host().same_bits(by_tiles.memory[i]->host()));
  }
  for (const size_t i : {3, 5, 6, 7}) {
    INFO("operand " << i);
    const HostTensor one = by_cudnn.memory[i]->host(), other = by_tiles.memory[i]->host();
    CHECK(relative_norm(one.values(), other.values()) < 3e-2);  // so they are numbers
    size_t differing = 0;
    for (size_t at = 0; at < one.size(); ++at) differing += one[at] != other[at] ? 1 : 0;
    CHECK(differing > 20);
  }
}

TEST_CASE("every altered element of the copies of a group is counted") {
  const ops::cuda::GroupPlaces places{3, 10, 4, 24, 4 * 40 + 8, 40};
  const HostTensor one = random_tensor(DType::kBF16, {10, 24}, 1);
  const HostTensor unused(DType::kBF16, {30, places.token_stride});
  const DeviceTensor group(one), all(unused), counter(HostTensor(DType::kI32, {2}));
  const auto* from = static_cast<const uint16_t*>(group.tensor().raw());
  auto* to = static_cast<uint16_t*>(all.tensor().raw());
  ops::cuda::repeat_group(gpu().cuda(), from, places, to);
  const auto unlike = [&] {
    copy_across(gpu(), HostTensor(DType::kI32, {2}, {0, 0}), counter);
    ops::cuda::count_unlike(gpu().cuda(), from, places, to, static_cast<uint64_t*>(counter.tensor().raw()));
    return static_cast<int64_t>(counter.host()[0]);
  };
  CHECK(unlike() == 0);
  HostTensor copies = all.host();
  for (int64_t row = 0; row < 30; ++row) {
    for (int64_t column = 0; column < places.token_stride; ++column) {
      const double value = copies[static_cast<size_t>(row * places.token_stride + column)];
      const bool used = column < 160 && column % 40 < 24;
      const bool right = used ? value == one[static_cast<size_t>(row % 10 * 24 + column % 40)] : std::isnan(value);
      if (!right) FAIL_CHECK("row " << row << ", column " << column);
    }
  }
  int64_t altered = 0;
  for (const int64_t at : {int64_t{0}, 29 * places.token_stride + 143, 14 * places.token_stride + 85}) {
    copies.set(static_cast<size_t>(at), copies[static_cast<size_t>(at)] * 1.0078125);  // by the last place or more
    copy_across(gpu(), copies, all);
    CHECK(unlike() == ++altered);
  }
  copies.set(30, 5.0);  // between two groups
  copy_across(gpu(), copies, all);
  CHECK(unlike() == altered);
}

// What a plan writes to one operand, or the statistics: of a group alone, and the same in all samples and groups.
struct Output {
  Output(DType dtype, const ops::cuda::GroupPlaces& places)
      : alone(random_tensor(dtype, {places.length, places.width}, 1)),
        all(HostTensor(dtype, {places.samples * places.length, places.token_stride})),
        last(static_cast<size_t>((places.samples * places.length - 1) * places.token_stride +
                                 (places.groups - 1) * places.group_stride + places.width - 1)) {
    const auto repeat = [&]<class Bits>(Bits /*type*/) {
      ops::cuda::repeat_group(gpu().cuda(), static_cast<const Bits*>(alone.tensor().raw()), places,
                              static_cast<Bits*>(all.tensor().raw()));
    };
    dtype == DType::kF32 ? repeat(uint32_t{}) : repeat(uint16_t{});
  }

  DeviceTensor alone, all;
  size_t last;  // element of the last group
};

TEST_CASE("one altered element of any output is found by the comparison of an attention proof") {
  const bool backward = GENERATE(false, true);
  ops::cuda::CudnnSpec spec;
  spec.backward = backward;
  spec.samples = 2;
  spec.sequence_length = 5;
  spec.query_heads = 6;
  spec.kv_heads = 3;
  spec.head_dim = 16;
  ops::cuda::CudnnPointers alone, all;
  std::list<Output> outputs;
  for (size_t operand = 0; operand < spec.operands(); ++operand) {
    const bool of_keys = spec.of_keys(operand);
    spec.head_stride[operand] = of_keys ? 24 : 16;
    spec.token_stride[operand] = of_keys ? 3 * 24 : 6 * 16 + 8;
    if (!spec.is_output(operand)) continue;
    const ops::cuda::GroupPlaces places{2, 5, 3, of_keys ? 16 : 32, spec.token_stride[operand], of_keys ? 24 : 32};
    const Output& output = outputs.emplace_back(DType::kBF16, places);
    alone.operands[operand] = output.alone.tensor().raw();
    all.operands[operand] = output.all.tensor().raw();
  }
  if (!backward) {
    const Output& output = outputs.emplace_back(DType::kF32, ops::cuda::GroupPlaces{2, 1, 3, 10, 30, 10});
    alone.statistics = output.alone.tensor().data<float>();
    all.statistics = output.all.tensor().data<float>();
  }
  REQUIRE(outputs.size() == (backward ? 3 : 2));

  const DeviceTensor counter(HostTensor(DType::kI32, {2}));
  const auto unlike = [&] {
    return ops::cuda::count_unlike_outputs(gpu().cuda(), spec, alone, all,
                                           static_cast<uint64_t*>(counter.tensor().raw()));
  };
  CHECK(unlike() == 0);
  for (const Output& output : outputs) {
    const HostTensor right = output.all.host();
    HostTensor altered = output.all.host();
    altered.set(output.last, altered[output.last] * 1.0078125);  // by the last place of bf16 or more
    copy_across(gpu(), altered, output.all);
    CHECK(unlike() == 1);
    copy_across(gpu(), right, output.all);
    CHECK(unlike() == 0);
  }
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
