#include <vector>

#include "ops/cuda/attention_backends.h"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {

std::span<const AttentionBackend* const> attention_backends() {
  static const std::vector<const AttentionBackend*> list = [] {
    std::vector<const AttentionBackend*> backends;
    if (const AttentionBackend* cudnn = cudnn_attention()) backends.push_back(cudnn);
    backends.push_back(&tiled_attention());
    backends.push_back(&plain_attention());
    return backends;
  }();
  return list;
}

}  // namespace invar::ops::cuda
