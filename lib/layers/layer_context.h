#pragma once

#include "observe/activation_dump.h"
#include "parallel/replica_groups.h"
#include "parallel/sum_policy.h"
#include "parallel/weight_store.h"

namespace invar {

// What layers are made of: a constructor adds its weights to the table. Not kept.
struct LayerSetup {
  ParameterTable& table;
  ReplicaGroups& groups;
  const SumPolicy& sums;
  bool sequence_parallel = false;

  Communicator* tensor() const { return groups.tensor(); }
  UnitCut cut(int64_t units) const { return sums.cut(units, *tensor()); }
};

// All that a layer works with in a pass; nothing is global. Activations are (tokens, features), sample-major; "local"
// ones are the slice of tokens that this rank holds outside a tensor-parallel region (see mappings.h).
//
// `saved` keeps what backward needs, `scratch` the rest; both are stacks. A layer that returns a tensor puts it on
// top of `scratch`, for the caller's scope to free.
struct LayerContext : SumContext {
  const SumPolicy& sums;
  WeightStore& weights;
  GradientSink& gradients;
  Arena& saved;
  Tensor document_starts{};    // i32 (T), all tokens; undefined: a sample is one document
  bool keep = false;           // backward also finds saved what it could cheaply make or gather again
  TensorSink* sink = nullptr;  // parity tools listen here

  HeldWeight forward_weight(WeightId id) const { return weights.use(id, Pass::kForward); }
  HeldWeight backward_weight(WeightId id) const { return weights.use(id, Pass::kBackward); }
};

// Hands rows of an activation to the sink that wants them, in host memory; see TensorSink.
void offer(const LayerContext& ctx, const std::string& name, const Tensor& local, int64_t first_row);

}  // namespace invar
