#include "layers/self_attention.h"

#include "layers/rms_norm.h"

namespace invar {
namespace {

// Rows per KV group of this rank: [q heads of the group, k, v].
WeightId add_qkv(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec,
                 const HeadPartition& heads) {
  const int64_t d = spec.head_dim;
  const int64_t group_rows = (heads.heads_per_group + 2) * d;
  Parameter q;
  q.name = spec.prefix + "q_proj.weight";
  q.shape = {spec.query_heads * d, spec.hidden_size};
  Parameter k;
  k.name = spec.prefix + "k_proj.weight";
  k.shape = {spec.kv_heads * d, spec.hidden_size};
  k.replicas = replicas.kv_heads(spec.query_heads, spec.kv_heads);
  k.partial_gradient = k.replicas != nullptr;  // each copy serves its own query heads
  Parameter v = k;
  v.name = spec.prefix + "v_proj.weight";
  for (int64_t group = 0; group < heads.kv_heads.size(); ++group) {
    const int64_t first_q = (heads.query_heads.begin + group * heads.heads_per_group) * d;
    const int64_t first_kv = (heads.kv_heads.begin + group) * d;
    const int64_t local = group * group_rows;
    q.runs.push_back({{first_q, first_q + heads.heads_per_group * d}, local});
    k.runs.push_back({{first_kv, first_kv + d}, local + heads.heads_per_group * d});
    v.runs.push_back({{first_kv, first_kv + d}, local + (heads.heads_per_group + 1) * d});
  }
  Weight weight;
  weight.name = spec.prefix + "qkv";
  weight.rows = heads.kv_heads.size() * group_rows;
  weight.cols = spec.hidden_size;
  weight.parameters = {std::move(q), std::move(k), std::move(v)};
  return table.add(std::move(weight));
}

WeightId add_out(ParameterTable& table, const AttentionSpec& spec, const HeadPartition& heads) {
  const int64_t d = spec.head_dim;
  Parameter o;
  o.name = spec.prefix + "o_proj.weight";
  o.shape = {spec.hidden_size, spec.query_heads * d};
  o.transposed = true;
  o.runs = {{{heads.query_heads.begin * d, heads.query_heads.end * d}, 0}};
  Weight weight;
  weight.name = o.name;
  weight.rows = heads.query_heads.size() * d;
  weight.cols = spec.hidden_size;
  weight.parameters = {std::move(o)};
  return table.add(std::move(weight));
}

}  // namespace

SelfAttention::SelfAttention(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec,
                             const ops::RopeTable& rope)
    : spec_(spec),
      heads_(partition_heads(spec.query_heads, spec.kv_heads, replicas.tensor()->size(), replicas.tensor()->rank())),
      rope_(rope),
      qkv_(add_qkv(table, replicas, spec, heads_)),
      out_(add_out(table, spec, heads_)),
      // Every rank sees its own heads only, with or without sequence parallelism.
      q_norm_(add_replicated_vector(table, replicas, spec.prefix + "q_norm.weight", spec.head_dim, true)),
      k_norm_(add_replicated_vector(table, replicas, spec.prefix + "k_norm.weight", spec.head_dim, true)) {}

ops::HeadView SelfAttention::view(const Tensor& qkv, Kind kind) const {
  const int64_t d = spec_.head_dim;
  const int64_t stride = (heads_.heads_per_group + 2) * d;
  const int64_t groups = heads_.kv_heads.size();
  switch (kind) {
    case Kind::kQuery:
      return {qkv, groups, heads_.heads_per_group, d, stride, 0};
    case Kind::kKey:
      return {qkv, groups, 1, d, stride, heads_.heads_per_group * d};
    case Kind::kValue:
      return {qkv, groups, 1, d, stride, (heads_.heads_per_group + 1) * d};
  }
  return {};
}

ops::HeadView SelfAttention::out_view(const Tensor& out) const {
  return {out, heads_.kv_heads.size(), heads_.heads_per_group, spec_.head_dim, heads_.heads_per_group * spec_.head_dim,
          0};
}

ops::AttentionParams SelfAttention::params(const LayerContext& ctx) const {
  return {ctx.sequence_length, static_cast<float>(spec_.scale), spec_.window};
}

void SelfAttention::norm_and_rotate(const LayerContext& ctx, const Tensor& qkv, const Tensor& rotated) const {
  const auto eps = static_cast<float>(spec_.norm_eps);
  ops::head_norm_rope_forward(ctx.stream, view(qkv, Kind::kQuery), ctx.weights.acquire_forward(q_norm_), eps, &rope_,
                              ctx.sequence_length, view(rotated, Kind::kQuery));
  ops::head_norm_rope_forward(ctx.stream, view(qkv, Kind::kKey), ctx.weights.acquire_forward(k_norm_), eps, &rope_,
                              ctx.sequence_length, view(rotated, Kind::kKey));
}

void SelfAttention::attend(const LayerContext& ctx, const Saved& saved) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor rotated = ctx.scratch.allocate("q, k rotated", ctx.activation, {ctx.region.tokens(), row()});
  norm_and_rotate(ctx, saved.qkv, rotated);
  const auto q = view(rotated, Kind::kQuery);
  const auto k = view(rotated, Kind::kKey);
  ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
      .forward(ctx.stream, params(ctx), q, k, view(saved.qkv, Kind::kValue), out_view(saved.out), saved.lse);
}

Tensor SelfAttention::forward(const LayerContext& ctx, const Tensor& x, Saved& saved) const {
  const int64_t tokens = ctx.region.tokens();
  saved.qkv = ctx.saved.allocate("qkv", ctx.activation, {tokens, row()});
  saved.out = ctx.saved.allocate("attention out", ctx.activation, {tokens, query_width()});
  saved.lse = ctx.saved.allocate("attention lse", DType::kF32, {tokens, heads_.query_heads.size()});
  qkv_.forward(ctx, x, saved.qkv);
  attend(ctx, saved);
  return out_.forward(ctx, saved.out);
}

Tensor SelfAttention::backward(const LayerContext& ctx, const Tensor& x, const Saved& saved, const Tensor& d_y) const {
  const int64_t tokens = ctx.region.tokens();
  const Tensor d_qkv = ctx.scratch.allocate("d_qkv", ctx.activation, {tokens, row()});
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor d_out = ctx.scratch.allocate("d_attention", ctx.activation, {tokens, query_width()});
    out_.backward(ctx, saved.out, d_y, d_out);

    const Tensor rotated = ctx.scratch.allocate("q, k rotated", ctx.activation, {tokens, row()});
    norm_and_rotate(ctx, saved.qkv, rotated);
    const Tensor delta = ctx.scratch.allocate("delta", DType::kF32, {tokens, heads_.query_heads.size()});
    const auto q = view(rotated, Kind::kQuery);
    const auto k = view(rotated, Kind::kKey);
    const auto d_q = view(d_qkv, Kind::kQuery);
    const auto d_k = view(d_qkv, Kind::kKey);
    ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
        .backward(ctx.stream, params(ctx), q, k, view(saved.qkv, Kind::kValue), out_view(saved.out), saved.lse,
                  out_view(d_out), delta, d_q, d_k, view(d_qkv, Kind::kValue));

    const auto eps = static_cast<float>(spec_.norm_eps);
    ops::head_norm_rope_backward(ctx.stream, d_q, view(saved.qkv, Kind::kQuery), ctx.weights.acquire_backward(q_norm_),
                                 eps, &rope_, ctx.sequence_length, d_q, ctx.weights.gradient(q_norm_));
    ops::head_norm_rope_backward(ctx.stream, d_k, view(saved.qkv, Kind::kKey), ctx.weights.acquire_backward(k_norm_),
                                 eps, &rope_, ctx.sequence_length, d_k, ctx.weights.gradient(k_norm_));
    ctx.weights.gradient_done(q_norm_);
    ctx.weights.gradient_done(k_norm_);
  }
  return qkv_.backward(ctx, x, d_qkv);
}

}  // namespace invar
