#pragma once

#include <optional>

#include "layers/linear.h"
#include "ops/attention.h"
#include "ops/norm.h"
#include "parallel/kv_gradients.h"

namespace invar {

struct AttentionSpec {
  std::string prefix;  // "model.layers.3.self_attn."
  int64_t hidden_size = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double norm_eps = 1e-6;         // of the head norms
  double scale = 1.0;             // of the scores
  int64_t window = 0;             // keys that a query sees, itself included; 0: full causal
  bool normed_values = false;     // RMSNorm without weight over each value head
  bool values_from_keys = false;  // the values are the raw keys: no v_proj
  bool borrows = false;           // keys and values are those of an earlier layer: no k_proj, v_proj, k_norm
};

// Keys and values that several layers use, in the form attention takes them, and the sum of their gradients.
struct SharedKv {
  Tensor kv;    // (T, Hkv of this rank · 2 · D): per KV head [k, v]
  Tensor d_kv;  // f32, the same shape
};

// Causal grouped-query attention with q/k norm and RoPE, tensor-parallel over heads (HeadPartition), computed by the
// calls that the cut of the heads says (HeadCut).
class SelfAttention {
 public:
  // What attention takes: rotated q, final k and v.
  struct Heads {
    ops::HeadView q, k, v;
  };
  // What backward needs; the projections are kept raw, their normed and rotated forms without ctx.keep computed again.
  struct Saved {
    Tensor x;     // (T, C) with ctx.keep: the input of all tokens
    Heads heads;  // with ctx.keep
    Tensor qkv;   // (T, rows of this rank): per KV group [q heads, k, v], without what the layer has not
    Tensor out;   // (T, Hq·D of this rank)
    Tensor lse;   // f32, for each call of attention in turn (T, its query heads)
  };

  SelfAttention(const LayerSetup& setup, const AttentionSpec& spec, const ops::RopeTable& rope);

  // x (local, C) -> (local, C). `shared` if the layer borrows (read) or others borrow from it (kv is written), else
  // null. With ctx.keep and without a gather x stays until backward.
  Tensor forward(const LayerContext& ctx, const Tensor& x, const SharedKv* shared, Saved& saved) const;
  // d_y (local, C) -> d_x (local, C). x as in forward, or with ctx.keep saved.x. A borrower adds to shared->d_kv, which
  // its owner, whose backward comes last, completes and takes.
  Tensor backward(const LayerContext& ctx, const Tensor& x, const SharedKv* shared, const Saved& saved,
                  const Tensor& d_y) const;

  // How attention over this many tokens is computed on the device, for a person.
  std::string explain(const LayerContext& ctx) const;

  // Columns of SharedKv on this rank.
  int64_t kv_width() const;

 private:
  enum class Kind { kQuery, kKey, kValue };
  int64_t group_rows() const;
  int64_t row() const { return heads_.kv_heads.size() * group_rows(); }
  int64_t query_width() const { return heads_.query_heads.size() * spec_.head_dim; }
  ops::HeadView raw(const Tensor& qkv, Kind kind) const;
  ops::HeadView per_head(const Tensor& out) const;
  ops::HeadView final_kv(const Tensor& kv, Kind kind) const;
  ops::AttentionParams params(const LayerContext& ctx) const;
  ops::HeadNormRope head_norm(const LayerContext& ctx, const Tensor& weight) const;
  ops::HeadNormRope value_norm() const;
  Heads prepare(const LayerContext& ctx, const Tensor& qkv, const SharedKv* shared) const;
  Tensor attention_backward(const LayerContext& ctx, const Heads& heads, const Saved& saved, const ops::HeadView& d_out,
                            const ops::HeadView& d_q, const ops::HeadView& d_v) const;
  void head_norm_backward(const LayerContext& ctx, Kind kind, const ops::HeadView& d_out, const Tensor& qkv,
                          const Tensor& d_qkv) const;
  void key_value_backward(const LayerContext& ctx, const Tensor& qkv, const Tensor& d_kv, const Tensor& d_qkv) const;

  AttentionSpec spec_;
  HeadCut cut_;
  HeadPartition heads_;
  std::vector<HeadCall> calls_;
  Communicator* kv_replicas_;  // ranks with copies of the KV heads, or null
  const ops::RopeTable& rope_;
  ColumnParallelLinear qkv_;
  RowParallelLinear out_;
  WeightId q_norm_;
  std::optional<WeightId> k_norm_;
};

}  // namespace invar
