#pragma once

#include "layers/linear.h"
#include "ops/attention.h"
#include "ops/norm.h"
#include "parallel/replica_groups.h"
#include "parallel/unit_partition.h"

namespace invar {

struct AttentionSpec {
  std::string prefix;  // "model.layers.3.self_attn."
  int64_t hidden_size = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double norm_eps = 1e-6;  // of q_norm and k_norm
  double scale = 1.0;      // of the scores
  int64_t window = 0;      // 0: full causal
};

// Causal grouped-query attention with q/k norm and RoPE, tensor-parallel over heads (HeadPartition).
class SelfAttention {
 public:
  // What backward needs; raw q and k are kept, their normed and rotated forms are computed again.
  struct Saved {
    Tensor qkv;  // (T, rows of this rank): per KV group [q heads, k, v]
    Tensor out;  // (T, Hq·D of this rank)
    Tensor lse;  // f32 (T, Hq of this rank)
  };

  SelfAttention(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec, const ops::RopeTable& rope);

  // x (local, C) -> (local, C).
  Tensor forward(const LayerContext& ctx, const Tensor& x, Saved& saved) const;
  // d_y (local, C) -> d_x (local, C).
  Tensor backward(const LayerContext& ctx, const Tensor& x, const Saved& saved, const Tensor& d_y) const;

 private:
  enum class Kind { kQuery, kKey, kValue };
  int64_t row() const { return heads_.kv_heads.size() * (heads_.heads_per_group + 2) * spec_.head_dim; }
  int64_t query_width() const { return heads_.query_heads.size() * spec_.head_dim; }
  ops::HeadView view(const Tensor& qkv, Kind kind) const;
  ops::HeadView out_view(const Tensor& out) const;
  ops::AttentionParams params(const LayerContext& ctx) const;
  void attend(const LayerContext& ctx, const Saved& saved) const;
  void norm_and_rotate(const LayerContext& ctx, const Tensor& qkv, const Tensor& rotated) const;

  AttentionSpec spec_;
  HeadPartition heads_;
  const ops::RopeTable& rope_;
  ColumnParallelLinear qkv_;
  RowParallelLinear out_;
  WeightId q_norm_;
  WeightId k_norm_;
};

}  // namespace invar
