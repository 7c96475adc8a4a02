#include <algorithm>
#include <map>
#include <mutex>

#include "core/integer.h"
#include "core/range.h"
#include "ops/attention_check.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/cudnn_gather.h"
#include "ops/cuda/cudnn_plans.h"
#include "ops/cuda/cudnn_proof.h"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

// cuDNN's deterministic backward keeps the scores of whole samples, so a large micro-batch goes through it a few
// samples at a time, or a few KV groups of one. That changes no bit: samples and groups do not meet.
constexpr int64_t kBackwardWorkspaceBytes = int64_t{2560} << 20;
constexpr int64_t kAlignment = 16;  // bytes, of every head
constexpr int64_t kBlockAlignment = 256;

using Views = std::array<HeadView, kOperands>;

// All but the direction and the strides.
CudnnSpec spec_of(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  CudnnSpec spec;
  spec.samples = q.tokens() / params.sequence_length;
  spec.sequence_length = params.sequence_length;
  spec.query_heads = q.heads();
  spec.kv_heads = k.heads();
  spec.head_dim = q.head_dim;
  spec.window = params.window < params.sequence_length ? params.window : 0;
  spec.scale = params.scale;
  return spec;
}

// Of one KV group of one sample: the answer may not depend on how many of them a rank has, or its bits would. A
// question costs a second, so answers are kept, per GPU.
const CudnnVerdict& verdict_on(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  const CudnnSpec group = one_group_of(spec_of(params, q, k), true);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");

  static std::mutex mutex;
  static std::map<std::pair<int, CudnnSpec>, CudnnVerdict> verdicts;
  const std::lock_guard lock(mutex);
  const auto [entry, added] = verdicts.try_emplace({device, group});
  if (added) entry->second = judge_cudnn(group);
  return entry->second;
}

bool aligned(const HeadView& view) {
  const int64_t bytes = size_of(view.buffer.dtype());
  const auto whole = [&](int64_t elements) { return elements * bytes % kAlignment == 0; };
  return reinterpret_cast<uintptr_t>(view.buffer.raw()) % kAlignment == 0 && whole(view.offset) &&
         whole(view.group_stride) && whole(view.token_stride()) && whole(view.head_dim);
}

std::string refusal_of(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  if (std::string refusal = cudnn_attention_refusal(params, q, k); !refusal.empty()) return refusal;
  if (!aligned(q) || !aligned(k)) return format("the heads of q and k must begin at multiples of {} bytes", kAlignment);
  return verdict_on(params, q, k).refusal;
}

// --- calls ---

// Elements from one head to the next; 0 if there is no such number.
int64_t head_stride(const HeadView& view) {
  if (view.heads_per_group == 1) return view.group_stride;
  const bool even = view.groups == 1 || view.group_stride == view.heads_per_group * view.head_dim;
  return even ? view.head_dim : 0;
}

// The same heads side by side at `memory`.
HeadView packed(const HeadView& like, void* memory) {
  const int64_t group_width = like.heads_per_group * like.head_dim;
  const Tensor buffer(memory, DType::kBF16, DeviceType::kCuda, {like.tokens(), like.groups * group_width});
  return {buffer, like.groups, like.heads_per_group, like.head_dim, group_width, 0};
}

HeadView part_of(HeadView view, Range tokens, Range groups) {
  view.buffer = view.buffer.rows(tokens.begin, tokens.end);
  view.offset += groups.begin * view.group_stride;
  view.groups = groups.size();
  return view;
}

int64_t block_bytes(int64_t bytes) {
  return round_up(bytes, kBlockAlignment);
}

// One execution. Heads that are not evenly spaced or coincide, and the statistics, pass through the workspace. lse: of
// all heads, of which `first_head` is the first one in the views; these may be a part of them if there is one sample.
class Call {
 public:
  Call(const Stream& stream, const AttentionParams& params, const Views& views, const Tensor& lse, int64_t first_head,
       bool backward)
      : stream_(stream),
        plans_(stream.cuda().attachment<CudnnPlans>()),
        views_(views),
        given_(views),
        lse_(lse),
        first_head_(first_head),
        backward_(backward),
        invariant_(params.numerics.invariant),
        spec_(spec_of(params, views[kQ], views[kK])) {
    spec_.backward = backward;
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand)) given_[operand] = packed(views[operand], nullptr);
      spec_.head_stride[operand] = head_stride(given_[operand]);
      spec_.token_stride[operand] = given_[operand].token_stride();
    }
  }

  void run() {
    auto& proofs = stream_.cuda().attachment<CudnnProofs>();
    const bool unproved = invariant_ && !proofs.has(spec_);
    const int64_t plan_bytes = plans_.workspace_bytes(spec_);
    std::byte* const memory = place_in_workspace(unproved ? proofs.workspace_bytes(spec_) : plan_bytes);
    const int64_t samples = spec_.samples, length = spec_.sequence_length, heads = lse_.dim(1);
    CudnnPointers pointers;
    pointers.statistics = stats_ + first_head_ * length;
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      pointers.operands[operand] = given_[operand].buffer.data<BF16>() + given_[operand].offset;
    }
    if (unproved) proofs.prove(spec_, pointers, memory);
    if (backward_) transpose_batch(stream_, lse_.data<float>(), stats_, samples, length, heads);
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand) && !spec_.is_output(operand)) cuda::copy_heads(stream_, views_[operand], given_[operand]);
    }
    plans_.execute(spec_, pointers, memory);
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand) && spec_.is_output(operand)) cuda::copy_heads(stream_, given_[operand], views_[operand]);
    }
    if (!backward_) transpose_batch(stream_, stats_, lse_.data<float>(), samples, heads, length);
  }

 private:
  bool is_packed(size_t operand) const { return head_stride(views_[operand]) == 0; }

  // Gives the statistics and the packed heads their places, and returns cuDNN's.
  std::byte* place_in_workspace(int64_t plan_bytes) {
    const auto heads_bytes = [&](size_t operand) {
      return block_bytes(views_[operand].tokens() * views_[operand].heads() * spec_.head_dim * 2);
    };
    int64_t bytes = block_bytes(lse_.bytes()) + plan_bytes;
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      bytes += is_packed(operand) ? heads_bytes(operand) : 0;
    }
    auto* memory = static_cast<std::byte*>(stream_.cuda().workspace(bytes));
    stats_ = reinterpret_cast<float*>(memory);
    memory += block_bytes(lse_.bytes());
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (!is_packed(operand)) continue;
      given_[operand] = packed(views_[operand], memory);
      memory += heads_bytes(operand);
    }
    return memory;
  }

  const Stream& stream_;
  CudnnPlans& plans_;
  const Views& views_;
  Views given_;  // to cuDNN
  const Tensor& lse_;
  int64_t first_head_;
  bool backward_;
  bool invariant_;
  CudnnSpec spec_;
  float* stats_ = nullptr;  // (samples, all heads, S)
};

struct AtOnce {
  int64_t samples, groups;
};

// As much as the workspace has room for: whole samples, or groups of one.
AtOnce backward_at_once(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  const int64_t bytes = std::max<int64_t>(verdict_on(params, q, k).backward_workspace_bytes, 1);
  const int64_t most = std::max<int64_t>(kBackwardWorkspaceBytes / bytes, 1);
  return {std::max<int64_t>(most / q.groups, 1), std::min(most, q.groups)};
}

void run(const Stream& stream, const AttentionParams& params, const Views& views, const Tensor& lse, bool backward) {
  const HeadView& q = views[kQ];
  if (q.tokens() == 0) return;
  const std::string refusal = refusal_of(params, q, views[kK]);
  INVAR_CHECK(refusal.empty(), "cudnn attention: {}", refusal);
  const size_t operands = backward ? size_t{kOperands} : size_t{kDOut};
  for (size_t operand = 0; operand < operands; ++operand) {
    INVAR_CHECK(aligned(views[operand]), "cudnn attention: operand {} must begin at multiples of {} bytes", operand,
                kAlignment);
  }
  const int64_t samples = q.tokens() / params.sequence_length;
  const AtOnce at_once = backward ? backward_at_once(params, q, views[kK]) : AtOnce{samples, q.groups};
  for (int64_t sample = 0; sample < samples; sample += at_once.samples) {
    const Range tokens{sample * params.sequence_length,
                       std::min(sample + at_once.samples, samples) * params.sequence_length};
    const Tensor part_lse = lse.rows(tokens.begin, tokens.end);
    for (int64_t group = 0; group < q.groups; group += at_once.groups) {
      const Range groups{group, std::min(group + at_once.groups, q.groups)};
      Views part;
      for (size_t operand = 0; operand < operands; ++operand) part[operand] = part_of(views[operand], tokens, groups);
      Call(stream, params, part, part_lse, group * q.heads_per_group, backward).run();
    }
  }
}

class CudnnAttention : public AttentionBackend {
 public:
  std::string name() const override { return "cudnn"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    return refusal_of(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
    run(stream, params, {q, k, v, out, {}, {}, {}, {}}, lse, false);
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    run(stream, params, {q, k, v, out, d_out, d_q, d_k, d_v}, lse, true);
  }
};

}  // namespace

const AttentionBackend* cudnn_attention() {
  static const CudnnAttention backend;
  return &backend;
}

}  // namespace invar::ops::cuda
