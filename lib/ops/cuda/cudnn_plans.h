#pragma once

#include <array>
#include <compare>
#include <memory>
#include <string>

#include "device/cuda/cuda_stream.h"

// cuDNN's plans for attention in bf16: forward with its statistics, or its deterministic backward.
namespace invar::ops::cuda {

// A forward pass has those before kDOut.
enum CudnnOperand : size_t { kQ, kK, kV, kOut, kDOut, kDQ, kDK, kDV, kOperands };

// What a plan is built for. Element (sample, head, token, d) of an operand lies at (sample · sequence_length + token) ·
// token_stride + head · head_stride + d.
struct CudnnSpec {
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

  auto operator<=>(const CudnnSpec&) const = default;

  size_t operands() const { return backward ? size_t{kOperands} : size_t{kDOut}; }
  bool is_output(size_t operand) const { return backward ? operand >= kDQ : operand == kOut; }
  bool of_keys(size_t operand) const { return operand == kK || operand == kV || operand == kDK || operand == kDV; }
  int64_t heads(size_t operand) const { return of_keys(operand) ? kv_heads : query_heads; }
  // Bytes from the first sample's first row to the last one's end.
  int64_t bytes(size_t operand) const { return samples * sequence_length * token_stride[operand] * 2; }
  int64_t statistics() const { return samples * query_heads * sequence_length; }  // f32 numbers
  // "2 x 4096 tokens, 16 query heads on 8 KV heads of 128, backward"
  std::string describe() const;
};

// One KV group of one sample of it, the heads of each operand side by side in memory of their own.
CudnnSpec one_group_of(const CudnnSpec& spec, bool backward);

// Whether cuDNN can do both passes over one group.
struct CudnnVerdict {
  std::string refusal;  // in its words
  int64_t backward_workspace_bytes = 0;
};
CudnnVerdict judge_cudnn(const CudnnSpec& group);

// Operands in device memory, each from its first head on, and the statistics, f32 (samples, query heads, S): the log of
// the sum of exp(scaled scores), which a forward pass writes and a backward one reads.
struct CudnnPointers {
  std::array<void*, kOperands> operands{};
  float* statistics = nullptr;
};

// The plans of a stream, its attachment; each is built when it is first asked for. Error{kFault} in cuDNN's words.
class CudnnPlans {
 public:
  explicit CudnnPlans(CudaStream& stream);
  ~CudnnPlans();

  int64_t workspace_bytes(const CudnnSpec& spec);
  void execute(const CudnnSpec& spec, const CudnnPointers& pointers, void* workspace);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace invar::ops::cuda
