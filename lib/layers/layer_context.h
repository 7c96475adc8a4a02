#pragma once

#include "observe/activation_dump.h"
#include "parallel/mappings.h"
#include "parallel/weight_provider.h"

namespace invar {

// All that a layer works with; nothing is global. Activations are (tokens, features), sample-major; "local" ones are
// the slice of tokens that this rank holds outside a tensor-parallel region (see mappings.h).
//
// `saved` keeps what backward needs, `scratch` the rest; both are stacks. A layer that returns a tensor leaves it on
// top of `scratch`, for the caller's scope to free.
struct LayerContext {
  const Stream& stream;
  const TensorRegion& region;
  WeightProvider& weights;
  Arena& saved;
  Arena& scratch;
  DType activation;  // dtype of activations and their gradients
  int64_t sequence_length;
  Tensor document_starts{};    // i32 (T), all tokens; undefined: a sample is one document
  bool keep = false;           // backward also finds saved what it could cheaply make or gather again
  TensorSink* sink = nullptr;  // parity tools listen here
};

// Hands rows of an activation to the sink that wants them, in host memory; see TensorSink.
void offer(const LayerContext& ctx, const std::string& name, const Tensor& local, int64_t first_row);

}  // namespace invar
