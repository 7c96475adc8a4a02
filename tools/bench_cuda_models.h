#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/gated_activation.h"

// The models whose shapes bench_cuda measures.
namespace invar::bench {

struct AttentionShape {
  int64_t query_heads = 16;
  int64_t kv_heads = 8;
  int64_t head_dim = 128;
  int64_t window = 0;
};

struct Model {
  std::string name;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t vocabulary = 0;
  int64_t samples = 0;
  ops::Activation activation = ops::Activation::kSilu;
  std::vector<AttentionShape> attention{{}};  // the first one's heads are those of the other rows

  int64_t tokens() const { return samples * kSequence; }
  static constexpr int64_t kSequence = 4096;
};

inline const std::vector<Model>& models() {
  static const std::vector<Model> list = {
      {"0.6b", 1024, 3072, 151936, 4},
      {"1.7b", 2048, 6144, 151936, 2},
      {"8b", 4096, 12288, 151936, 2, ops::Activation::kSilu, {{32, 8, 128, 0}}},
      {"gemma", 2560, 10240, 262144, 2, ops::Activation::kGeluTanh, {{8, 2, 256, 512}, {8, 2, 512, 0}}},
  };
  return list;
}

}  // namespace invar::bench
