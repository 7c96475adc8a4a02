#include "ops/cuda/cudnn_plans.h"

#define CUDNN_FRONTEND_SKIP_JSON_LIB  // it brings its own nlohmann json
#include <cudnn_frontend.h>

#include <map>
#include <unordered_map>

#include "core/format.h"
#include "core/unique_handle.h"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

namespace fe = cudnn_frontend;

// One group may take more than that, but not the memory of the model: 2 bytes for each query head and pair of tokens.
constexpr int64_t kLargestWorkspaceBytes = int64_t{10} << 30;
constexpr int64_t kStatsUid = 100;

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

int64_t uid_of(size_t operand) {
  return static_cast<int64_t>(operand) + 1;
}

void place(const CudnnSpec& spec, size_t operand, fe::graph::Tensor_attributes& tensor) {
  tensor.set_uid(uid_of(operand))
      .set_dim({spec.samples, spec.heads(operand), spec.sequence_length, spec.head_dim})
      .set_stride(
          {spec.sequence_length * spec.token_stride[operand], spec.head_stride[operand], spec.token_stride[operand], 1})
      .set_data_type(fe::DataType_t::BFLOAT16);
}

// (samples, heads, S), the one layout that the backward graph reads.
void place_stats(const CudnnSpec& spec, fe::graph::Tensor_attributes& tensor) {
  tensor.set_uid(kStatsUid)
      .set_dim({spec.samples, spec.query_heads, spec.sequence_length, 1})
      .set_stride({spec.query_heads * spec.sequence_length, spec.sequence_length, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

// Key j is visible to query i if i − window < j <= i: `window` keys with itself, as in AttentionParams.
template <class Attributes>
Attributes mask_and_scale(const CudnnSpec& spec) {
  Attributes attributes;
  attributes.set_attn_scale(spec.scale);
  attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  if (spec.window > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(spec.window));
  return attributes;
}

void describe(const CudnnSpec& spec, fe::graph::Graph& graph) {
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
std::string build(cudnnHandle_t handle, const CudnnSpec& spec, Plan& plan) {
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

}  // namespace

std::string CudnnSpec::describe() const {
  return format("{} x {} tokens, {} query heads on {} KV heads of {}{}, {}", samples, sequence_length, query_heads,
                kv_heads, head_dim, window > 0 ? format(", window {}", window) : "", backward ? "backward" : "forward");
}

CudnnSpec one_group_of(const CudnnSpec& spec, bool backward) {
  CudnnSpec one = spec;
  one.backward = backward;
  one.samples = 1;
  one.query_heads = spec.query_heads / spec.kv_heads;
  one.kv_heads = 1;
  one.head_stride = {};
  one.token_stride = {};
  for (size_t operand = 0; operand < one.operands(); ++operand) {
    one.head_stride[operand] = one.head_dim;
    one.token_stride[operand] = one.heads(operand) * one.head_dim;
  }
  return one;
}

CudnnVerdict judge_cudnn(const CudnnSpec& group) {
  CudnnSpec spec = group;
  CudnnVerdict verdict;
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

std::string cudnn_version() {
  const size_t version = cudnnGetVersion();
  return format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

struct CudnnPlans::State {
  Plan& plan(const CudnnSpec& spec) {
    std::unique_ptr<Plan>& slot = plans[spec];
    if (slot == nullptr) {
      auto plan = std::make_unique<Plan>();
      const std::string failure = build(handle.get(), spec, *plan);
      if (!failure.empty()) throw Error(ErrorKind::kFault, "cudnn attention: " + failure);
      slot = std::move(plan);
    }
    return *slot;
  }

  Handle handle = make_handle();
  std::map<CudnnSpec, std::unique_ptr<Plan>> plans;
};

CudnnPlans::CudnnPlans(CudaStream& stream) : state_(std::make_unique<State>()) {
  check_cudnn(cudnnSetStream(state_->handle.get(), stream.handle()), "cudnnSetStream");
}

CudnnPlans::~CudnnPlans() = default;

int64_t CudnnPlans::workspace_bytes(const CudnnSpec& spec) {
  return state_->plan(spec).workspace_bytes;
}

void CudnnPlans::execute(const CudnnSpec& spec, const CudnnPointers& pointers, void* workspace) {
  std::unordered_map<int64_t, void*> by_uid{{kStatsUid, pointers.statistics}};
  for (size_t operand = 0; operand < spec.operands(); ++operand) by_uid[uid_of(operand)] = pointers.operands[operand];
  fe::error_t status = state_->plan(spec).graph.execute(state_->handle.get(), by_uid, workspace);
  if (status.is_bad()) throw Error(ErrorKind::kFault, "cudnn attention: " + status.get_message());
}

}  // namespace invar::ops::cuda
