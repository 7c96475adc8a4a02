#include "ops/cuda/attention_backends.h"

namespace invar::ops::cuda {

const AttentionBackend* cudnn_attention() {
  return nullptr;
}

}  // namespace invar::ops::cuda
