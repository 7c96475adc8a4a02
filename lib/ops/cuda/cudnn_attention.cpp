#define CUDNN_FRONTEND_SKIP_JSON_LIB  // it brings its own nlohmann json
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/range.h"
#include "core/unique_handle.h"
#include "device/cuda/cuda_stream.h"
#include "ops/attention_check.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/cudnn_gather.h"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

namespace fe = cudnn_frontend;

// cuDNN's deterministic backward keeps the scores of whole samples, so a large micro-batch goes through it a few
// samples at a time, or a few KV groups of one. That changes no bit: samples and groups do not meet.
constexpr int64_t kBackwardWorkspaceBytes = int64_t{2560} << 20;
// One group may take more than that, but not the memory of the model: 2 bytes for each query head and pair of tokens.
constexpr int64_t kLargestWorkspaceBytes = int64_t{10} << 30;
// Below this share of the sequence a window costs less in tiles that skip the rest (tools/bench_cuda: D=256, S=4096).
constexpr int64_t kWindowShare = 5;
constexpr int64_t kAlignment = 16;  // bytes, of every head
constexpr int64_t kBlockAlignment = 256;

enum Operand : size_t { kQ, kK, kV, kOut, kDOut, kDQ, kDK, kDV, kOperands };
using Views = std::array<HeadView, kOperands>;  // a forward pass has those before kDOut
constexpr int64_t kStatsUid = 100;

// What a graph is built for.
struct Spec {
  bool backward = false;
  int64_t samples = 0;
  int64_t sequence_length = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;  // 0: none
  float scale = 1.0f;
  std::array<int64_t, kOperands> head_stride{};
  std::array<int64_t, kOperands> token_stride{};

  auto operator<=>(const Spec&) const = default;

  size_t operands() const { return backward ? size_t{kOperands} : size_t{kDOut}; }
  int64_t heads(size_t operand) const {
    return operand == kK || operand == kV || operand == kDK || operand == kDV ? kv_heads : query_heads;
  }
};

// All but the direction and the strides.
Spec spec_of(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  Spec spec;
  spec.samples = q.tokens() / params.sequence_length;
  spec.sequence_length = params.sequence_length;
  spec.query_heads = q.heads();
  spec.kv_heads = k.heads();
  spec.head_dim = q.head_dim;
  spec.window = params.window < params.sequence_length ? params.window : 0;
  spec.scale = params.scale;
  return spec;
}

struct Plan {
  fe::graph::Graph graph;
  int64_t workspace_bytes = 0;
};

void check_cudnn(cudnnStatus_t status, std::string_view call) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw Error(ErrorKind::kFault, format("{}: {}", call, cudnnGetErrorString(status)));
}

using Handle = UniqueHandle<cudnnHandle_t, cudnnDestroy>;

Handle make_handle() {
  cudnnHandle_t handle = nullptr;
  check_cudnn(cudnnCreate(&handle), "cudnnCreate");
  return Handle(handle);
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// --- graphs ---

void place(const Spec& spec, size_t operand, fe::graph::Tensor_attributes& tensor) {
  tensor.set_uid(static_cast<int64_t>(operand) + 1)
      .set_dim({spec.samples, spec.heads(operand), spec.sequence_length, spec.head_dim})
      .set_stride(
          {spec.sequence_length * spec.token_stride[operand], spec.head_stride[operand], spec.token_stride[operand], 1})
      .set_data_type(fe::DataType_t::BFLOAT16);
}

// (samples, heads, S), the one layout that the backward graph reads.
void place_stats(const Spec& spec, fe::graph::Tensor_attributes& tensor) {
  tensor.set_uid(kStatsUid)
      .set_dim({spec.samples, spec.query_heads, spec.sequence_length, 1})
      .set_stride({spec.query_heads * spec.sequence_length, spec.sequence_length, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

// Key j is visible to query i if i − window < j <= i: `window` keys with itself, as in AttentionParams.
template <class Attributes>
Attributes mask_and_scale(const Spec& spec) {
  Attributes attributes;
  attributes.set_attn_scale(spec.scale);
  attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  if (spec.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(spec.window));
  return attributes;
}

void describe(const Spec& spec, fe::graph::Graph& graph) {
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto input = [&](size_t operand) {
    fe::graph::Tensor_attributes tensor;
    place(spec, operand, tensor);
    return graph.tensor(tensor);
  };
  const auto output = [&](size_t operand, fe::graph::Tensor_attributes& tensor) {
    tensor.set_output(true);
    place(spec, operand, tensor);
  };
  const auto q = input(kQ), k = input(kK), v = input(kV);
  if (!spec.backward) {
    auto attributes = mask_and_scale<fe::graph::SDPA_attributes>(spec);
    attributes.set_generate_stats(true);
    const auto [out, stats] = graph.sdpa(q, k, v, attributes);
    output(kOut, *out);
    stats->set_output(true);
    place_stats(spec, *stats);
    return;
  }
  fe::graph::Tensor_attributes stats;
  place_stats(spec, stats);
  auto attributes = mask_and_scale<fe::graph::SDPA_backward_attributes>(spec);
  attributes.set_deterministic_algorithm(true);
  const auto [d_q, d_k, d_v] = graph.sdpa_backward(q, k, v, input(kOut), input(kDOut), graph.tensor(stats), attributes);
  output(kDQ, *d_q);
  output(kDK, *d_k);
  output(kDV, *d_v);
}

// Empty, or why cuDNN cannot, in its words.
std::string build(cudnnHandle_t handle, const Spec& spec, Plan& plan) {
  try {
    describe(spec, plan.graph);
    fe::error_t status = plan.graph.build(handle, {fe::HeurMode_t::A});
    if (status.is_good()) status = plan.graph.get_workspace_size(plan.workspace_bytes);
    if (status.is_good()) return "";
    return format("cuDNN {}, {} pass: {}", cudnnGetVersion(), spec.backward ? "backward" : "forward",
                  first_line(status.get_message()));
  } catch (const std::exception& error) {  // cudnn-frontend's lower layers throw
    return format("cuDNN {}: {}", cudnnGetVersion(), error.what());
  }
}

// The handle and the graphs of a stream, each built once.
class CudnnPlans {
 public:
  explicit CudnnPlans(CudaStream& stream) : handle_(make_handle()) {
    check_cudnn(cudnnSetStream(handle_.get(), stream.handle()), "cudnnSetStream");
  }

  Plan& plan(const Spec& spec) {
    std::unique_ptr<Plan>& slot = plans_[spec];
    if (slot == nullptr) {
      auto plan = std::make_unique<Plan>();
      const std::string failure = build(handle_.get(), spec, *plan);
      if (!failure.empty()) throw Error(ErrorKind::kFault, "cudnn attention: " + failure);
      slot = std::move(plan);
    }
    return *slot;
  }

  void execute(Plan& plan, std::unordered_map<int64_t, void*>& pointers, void* workspace) {
    fe::error_t status = plan.graph.execute(handle_.get(), pointers, workspace);
    if (status.is_bad()) throw Error(ErrorKind::kFault, "cudnn attention: " + status.get_message());
  }

 private:
  Handle handle_;
  std::map<Spec, std::unique_ptr<Plan>> plans_;
};

// --- what cuDNN takes ---

struct Verdict {
  std::string refusal;
  int64_t backward_workspace_bytes = 0;
};

Verdict judge(Spec spec) {
  Verdict verdict;
  try {
    const Handle handle = make_handle();
    for (const bool backward : {false, true}) {
      spec.backward = backward;
      Plan plan;
      verdict.refusal = build(handle.get(), spec, plan);
      if (!verdict.refusal.empty()) return verdict;
      verdict.backward_workspace_bytes = plan.workspace_bytes;
    }
    if (verdict.backward_workspace_bytes > kLargestWorkspaceBytes) {
      verdict.refusal = format("its backward pass needs {} MiB of workspace for a KV group, more than {}",
                               verdict.backward_workspace_bytes >> 20, kLargestWorkspaceBytes >> 20);
    }
  } catch (const Error& error) {
    verdict.refusal = error.what();
  }
  return verdict;
}

// Of one KV group of one sample, its heads side by side: the answer may not depend on how many of them a rank has, or
// its bits would. A question costs a second, so answers are kept, per GPU.
const Verdict& verdict_on(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  Spec spec = spec_of(params, q, k);
  spec.samples = 1;
  spec.query_heads = q.heads_per_group;
  spec.kv_heads = 1;
  for (size_t operand = 0; operand < kOperands; ++operand) {
    spec.head_stride[operand] = spec.head_dim;
    spec.token_stride[operand] = spec.heads(operand) * spec.head_dim;
  }
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");

  static std::mutex mutex;
  static std::map<std::pair<int, Spec>, Verdict> verdicts;
  const std::lock_guard lock(mutex);
  const auto [entry, added] = verdicts.try_emplace({device, spec});
  if (added) entry->second = judge(spec);
  return entry->second;
}

bool aligned(const HeadView& view) {
  const int64_t bytes = size_of(view.buffer.dtype());
  const auto whole = [&](int64_t elements) { return elements * bytes % kAlignment == 0; };
  return reinterpret_cast<uintptr_t>(view.buffer.raw()) % kAlignment == 0 && whole(view.offset) &&
         whole(view.group_stride) && whole(view.token_stride()) && whole(view.head_dim);
}

std::string refusal_of(const AttentionParams& params, const HeadView& q, const HeadView& k) {
  if (std::string refusal = common_attention_refusal(params, q, k); !refusal.empty()) return refusal;
  if (q.buffer.dtype() != DType::kBF16) return "it computes in bf16 only";
  if (params.document_starts.defined()) return "it does not know documents inside a sample";
  if (!(params.scale > 0)) return format("the scale is {}; it takes positive ones", params.scale);
  if (params.window > 0 && kWindowShare * params.window < params.sequence_length) {
    return format("its deterministic backward computes what a window of {} in {} hides", params.window,
                  params.sequence_length);
  }
  if (q.head_dim % 8 != 0 || q.head_dim > 256) return "head_dim must be a multiple of 8 and at most 256";
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
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

// One execution. Heads that are not evenly spaced, and the statistics, pass through the workspace. lse: of all heads,
// of which `first_head` is the first one in the views; these may be a part of them if there is one sample.
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
        spec_(spec_of(params, views[kQ], views[kK])) {
    spec_.backward = backward;
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand)) given_[operand] = packed(views[operand], nullptr);
      spec_.head_stride[operand] = head_stride(given_[operand]);
      spec_.token_stride[operand] = given_[operand].token_stride();
    }
  }

  void run() {
    Plan& plan = plans_.plan(spec_);
    std::byte* const memory = place_in_workspace(plan.workspace_bytes);
    const int64_t samples = spec_.samples, length = spec_.sequence_length, heads = lse_.dim(1);
    if (backward_) transpose_batch(stream_, lse_.data<float>(), stats_, samples, length, heads);
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand) && !is_output(operand)) copy_heads(stream_, views_[operand], given_[operand]);
    }
    std::unordered_map<int64_t, void*> pointers{{kStatsUid, stats_ + first_head_ * length}};
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      pointers[static_cast<int64_t>(operand) + 1] = given_[operand].buffer.data<BF16>() + given_[operand].offset;
    }
    plans_.execute(plan, pointers, memory);
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (is_packed(operand) && is_output(operand)) copy_heads(stream_, given_[operand], views_[operand]);
    }
    if (!backward_) transpose_batch(stream_, stats_, lse_.data<float>(), samples, heads, length);
  }

 private:
  bool is_packed(size_t operand) const { return head_stride(views_[operand]) == 0; }
  bool is_output(size_t operand) const { return backward_ ? operand >= kDQ : operand == kOut; }

  // Gives the statistics and the packed heads their places, and returns cuDNN's.
  std::byte* place_in_workspace(int64_t plan_bytes) {
    const int64_t heads_bytes = block_bytes(views_[kQ].tokens() * spec_.query_heads * spec_.head_dim * 2);
    int64_t bytes = block_bytes(lse_.bytes()) + plan_bytes;
    for (size_t operand = 0; operand < spec_.operands(); ++operand) bytes += is_packed(operand) ? heads_bytes : 0;
    auto* memory = static_cast<std::byte*>(stream_.cuda().workspace(bytes));
    stats_ = reinterpret_cast<float*>(memory);
    memory += block_bytes(lse_.bytes());
    for (size_t operand = 0; operand < spec_.operands(); ++operand) {
      if (!is_packed(operand)) continue;
      given_[operand] = packed(views_[operand], memory);
      memory += heads_bytes;
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
  Spec spec_;
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
