#pragma once

#include "device/arena.h"
#include "device/stream.h"
#include "parallel/mappings.h"

namespace invar {

// What a sum within a layer works with.
struct SumContext {
  const Stream& stream;
  const TensorRegion& region;
  Arena& scratch;
  DType activation;  // dtype of activations and their gradients
  int64_t sequence_length;
};

}  // namespace invar
