#pragma once

#include <set>

#include "ops/cuda/cudnn_plans.h"

namespace invar::ops::cuda {

// Which plans of a stream have the bits of every layout; its attachment. A plan is proved on made-up numbers: one KV
// group of one sample, by the plan for just that, and copies of it as all samples and groups of the call, by the plan
// in question. Every copy must have the bits of the group alone: out and the statistics, or d_q, d_k and d_v. So plans
// for any number of samples and groups and any strides agree with one another. Nothing is proved of plans for another
// number of query heads on a KV head, which is the same at all layouts (HeadCut), nor of other GPUs or cuDNN versions.
class CudnnProofs {
 public:
  explicit CudnnProofs(CudaStream& stream) : stream_(stream), plans_(stream.attachment<CudnnPlans>()) {}

  bool has(const CudnnSpec& spec) const { return proved_.contains(spec); }
  // Of the plan and of those that it is compared with.
  int64_t workspace_bytes(const CudnnSpec& spec);
  // Error{kFault} if bits differ, or if there is no memory for the proof. What the plan writes is written to `given`;
  // what it reads lies elsewhere, but for a backward plan's statistics, which are overwritten.
  void prove(const CudnnSpec& spec, const CudnnPointers& given, void* workspace);

 private:
  void fill(const CudnnSpec& one, const CudnnPointers& alone) const;

  CudaStream& stream_;
  CudnnPlans& plans_;
  std::set<CudnnSpec> proved_;
};

// How many elements of what a plan writes, out and the statistics or d_q, d_k and d_v of all samples and groups, have
// not the bits of one group alone, whose heads lie side by side. counter: in device memory. Waits for the stream.
int64_t count_unlike_outputs(CudaStream& stream, const CudnnSpec& spec, const CudnnPointers& alone,
                             const CudnnPointers& all, uint64_t* counter);

}  // namespace invar::ops::cuda
