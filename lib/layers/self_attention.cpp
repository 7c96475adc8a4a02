#include "layers/self_attention.h"

#include "layers/rms_norm.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

// Raw heads of k and v per KV group.
int64_t raw_kv_heads(const AttentionSpec& spec) {
  return spec.borrows ? 0 : (spec.values_from_keys ? 1 : 2);
}

// In fixed order a rank holds whole KV groups.
HeadPartition hold_heads(const ParameterTable& table, const AttentionSpec& spec, const UnitCut& groups,
                         const Communicator& tensor) {
  if (!table.fixed_order()) return partition_heads(spec.query_heads, spec.kv_heads, tensor.size(), tensor.rank());
  return hold_groups(spec.query_heads, spec.kv_heads, groups.mine(), tensor.rank());
}

// Rows per KV group of this rank: [q heads of the group, k, v], without what the layer has not.
WeightId add_qkv(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec, const HeadPartition& heads,
                 const UnitCut& groups) {
  const int64_t d = spec.head_dim;
  const int64_t group_rows = (heads.heads_per_group + raw_kv_heads(spec)) * d;
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
  weight.parameters = {std::move(q)};
  weight.leaves = groups.leaf_cut(group_rows);
  if (!spec.borrows) weight.parameters.push_back(std::move(k));
  if (!spec.borrows && !spec.values_from_keys) weight.parameters.push_back(std::move(v));
  return table.add(std::move(weight));
}

WeightId add_out(ParameterTable& table, const AttentionSpec& spec, const HeadPartition& heads, const UnitCut& groups) {
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
  weight.leaves = groups.leaf_cut(heads.heads_per_group * d);
  weight.parameters = {std::move(o)};
  return table.add(std::move(weight));
}

}  // namespace

SelfAttention::SelfAttention(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec,
                             const ops::RopeTable& rope)
    : spec_(spec),
      groups_(table.cut(spec.kv_heads, *replicas.tensor())),
      heads_(hold_heads(table, spec, groups_, *replicas.tensor())),
      rope_(rope),
      qkv_(add_qkv(table, replicas, spec, heads_, groups_)),
      out_(add_out(table, spec, heads_, groups_)),
      // Every rank sees its own heads only, with or without sequence parallelism.
      q_norm_(add_replicated_vector(table, replicas, spec.prefix + "q_norm.weight", spec.head_dim, true)) {
  INVAR_CHECK(spec.normed_values || (!spec.borrows && !spec.values_from_keys),
              "{}: values that are shared or taken from the keys are normed", spec.prefix);
  if (!spec.borrows) {
    k_norm_ = add_replicated_vector(table, replicas, spec.prefix + "k_norm.weight", spec.head_dim, true);
  } else {  // released files have them, Hugging Face does not write them again
    for (const char* name : {"k_proj.weight", "v_proj.weight", "k_norm.weight"}) table.add_unused(spec.prefix + name);
  }
}

int64_t SelfAttention::kv_width() const {
  return heads_.kv_heads.size() * (spec_.normed_values ? 2 : 1) * spec_.head_dim;
}

int64_t SelfAttention::group_rows() const {
  return (heads_.heads_per_group + raw_kv_heads(spec_)) * spec_.head_dim;
}

// The heads of one kind in the projections' rows.
ops::HeadView SelfAttention::raw(const Tensor& qkv, Kind kind) const {
  const int64_t d = spec_.head_dim;
  const int64_t groups = heads_.kv_heads.size();
  if (kind == Kind::kQuery) return {qkv, groups, heads_.heads_per_group, d, group_rows(), 0};
  const bool second = kind == Kind::kValue && !spec_.values_from_keys;
  return {qkv, groups, 1, d, group_rows(), (heads_.heads_per_group + (second ? 1 : 0)) * d};
}

// (T, Hq·D): the query heads alone.
ops::HeadView SelfAttention::per_head(const Tensor& out) const {
  const int64_t group_width = heads_.heads_per_group * spec_.head_dim;
  return {out, heads_.kv_heads.size(), heads_.heads_per_group, spec_.head_dim, group_width, 0};
}

ops::HeadView SelfAttention::final_kv(const Tensor& kv, Kind kind) const {
  const int64_t d = spec_.head_dim;
  const int64_t groups = heads_.kv_heads.size();
  return {kv, groups, 1, d, kv_width() / groups, kind == Kind::kValue ? d : 0};
}

ops::AttentionParams SelfAttention::params(const LayerContext& ctx) const {
  return {ctx.sequence_length, static_cast<float>(spec_.scale), spec_.window, ctx.document_starts};
}

// Of queries and keys.
ops::HeadNormRope SelfAttention::head_norm(const LayerContext& ctx, const Tensor& weight) const {
  return {weight, static_cast<float>(spec_.norm_eps), &rope_, ctx.sequence_length, ctx.document_starts};
}

ops::HeadNormRope SelfAttention::value_norm() const {
  return {Tensor(), static_cast<float>(spec_.norm_eps), nullptr, 0, Tensor()};
}

// Fills shared->kv if this layer provides it; otherwise what it makes is on top of scratch.
SelfAttention::Heads SelfAttention::prepare(const LayerContext& ctx, const Tensor& qkv, const SharedKv* shared) const {
  const int64_t tokens = ctx.region.tokens();
  Heads heads;
  heads.q = per_head(ctx.scratch.allocate("q rotated", ctx.activation, {tokens, query_width()}));
  ops::head_norm_rope_forward(ctx.stream, head_norm(ctx, ctx.weights.acquire_forward(q_norm_)), raw(qkv, Kind::kQuery),
                              heads.q);
  const Tensor kv = shared != nullptr ? shared->kv : ctx.scratch.allocate("k, v", ctx.activation, {tokens, kv_width()});
  heads.k = final_kv(kv, Kind::kKey);
  heads.v = spec_.normed_values ? final_kv(kv, Kind::kValue) : raw(qkv, Kind::kValue);
  if (spec_.borrows) return heads;
  ops::head_norm_rope_forward(ctx.stream, head_norm(ctx, ctx.weights.acquire_forward(*k_norm_)), raw(qkv, Kind::kKey),
                              heads.k);
  if (spec_.normed_values) {
    ops::head_norm_rope_forward(ctx.stream, value_norm(), raw(qkv, Kind::kValue), heads.v);
  }
  return heads;
}

std::string SelfAttention::explain(const LayerContext& ctx) const {
  const int64_t tokens = ctx.region.tokens();
  const auto without_memory = [&](int64_t width) {
    return Tensor(nullptr, ctx.activation, ctx.stream.device(), {tokens, width});
  };
  return ops::explain_attention(ctx.stream.device(), params(ctx), per_head(without_memory(query_width())),
                                final_kv(without_memory(kv_width()), Kind::kKey));
}

Tensor SelfAttention::forward(const LayerContext& ctx, const Tensor& x, const SharedKv* shared, Saved& saved) const {
  const int64_t tokens = ctx.region.tokens();
  saved.qkv = ctx.saved.allocate("qkv", ctx.activation, {tokens, row()});
  saved.out = ctx.saved.allocate("attention out", ctx.activation, {tokens, query_width()});
  saved.lse = ctx.saved.allocate("attention lse", DType::kF32, {tokens, heads_.query_heads.size()});
  qkv_.forward(ctx, x, saved.qkv);
  {
    const ArenaScope scope(ctx.scratch);
    const Heads heads = prepare(ctx, saved.qkv, shared);
    ops::choose_attention(ctx.stream.device(), params(ctx), heads.q, heads.k)
        .forward(ctx.stream, params(ctx), heads.q, heads.k, heads.v, per_head(saved.out), saved.lse);
  }
  return out_.forward(ctx, saved.out);
}

Tensor SelfAttention::backward(const LayerContext& ctx, const Tensor& x, const SharedKv* shared, const Saved& saved,
                               const Tensor& d_y) const {
  const int64_t tokens = ctx.region.tokens();
  const Tensor d_qkv = ctx.scratch.allocate("d_qkv", ctx.activation, {tokens, row()});
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor d_out = ctx.scratch.allocate("d_attention", ctx.activation, {tokens, query_width()});
    out_.backward(
        ctx, [&] { return saved.out; }, d_y, d_out);

    const Heads heads = prepare(ctx, saved.qkv, shared);
    const Tensor delta = ctx.scratch.allocate("delta", DType::kF32, {tokens, heads_.query_heads.size()});
    // Query heads side by side, as attention wants them, and not yet among those of d_qkv.
    const auto d_q = per_head(ctx.scratch.allocate("d_q", ctx.activation, {tokens, query_width()}));
    const Tensor d_kv = ctx.scratch.allocate("d_k, d_v", ctx.activation, {tokens, kv_width()});
    const auto d_v = spec_.normed_values ? final_kv(d_kv, Kind::kValue) : raw(d_qkv, Kind::kValue);
    ops::choose_attention(ctx.stream.device(), params(ctx), heads.q, heads.k)
        .backward(ctx.stream, params(ctx), heads.q, heads.k, heads.v, per_head(saved.out), saved.lse, per_head(d_out),
                  delta, d_q, final_kv(d_kv, Kind::kKey), d_v);

    head_norm_backward(ctx, q_norm_, d_q, raw(saved.qkv, Kind::kQuery), raw(d_qkv, Kind::kQuery));
    if (shared != nullptr) ops::add(ctx.stream, shared->d_kv, d_kv, shared->d_kv);
    if (!spec_.borrows) {
      if (shared != nullptr) ops::copy(ctx.stream, shared->d_kv, d_kv);
      key_value_backward(ctx, saved.qkv, d_kv, d_qkv);
    }
  }
  return qkv_.backward(ctx, x, d_qkv);
}

// In fixed order the terms of a sample are added by head, then over all heads of the model.
void SelfAttention::head_norm_backward(const LayerContext& ctx, WeightId weight, const ops::HeadView& d_out,
                                       const ops::HeadView& in, const ops::HeadView& d_in) const {
  const ArenaScope scope(ctx.scratch);
  const ops::HeadNormRope norm = head_norm(ctx, ctx.weights.acquire_backward(weight));
  const Range all_tokens{0, ctx.region.tokens()};
  const auto run = [&](const Tensor& d_weight) {
    ops::head_norm_rope_backward(ctx.stream, norm, d_out, in, ops::Write::kSet, d_in, d_weight);
  };
  if (ctx.region.token_block() == 0) {
    ctx.weights.accumulate(ctx.stream, weight, all_tokens, [&](Range, const Tensor& into) { run(into); });
  } else {
    const int64_t samples = ctx.region.tokens() / ctx.sequence_length;
    const int64_t d = spec_.head_dim;
    const int64_t heads_per_group = in.heads() / groups_.mine().size();
    const Tensor own = ctx.scratch.allocate("sums by head", DType::kF32, {in.heads(), samples, d});
    ops::zero(ctx.stream, own);
    run(own);
    std::vector<int64_t> counts;
    for (const Range& groups : groups_.runs()) counts.push_back(groups.size() * heads_per_group * samples * d);
    const int64_t heads = groups_.runs().back().end * heads_per_group;
    Tensor all = own.view({in.heads(), samples * d});
    if (ctx.region.group().size() > 1) {
      all = ctx.scratch.allocate("sums of all heads", DType::kF32, {heads, samples * d});
      ctx.region.group().all_gather(ctx.stream, own, all, counts);
    }
    const Tensor by_sample = ctx.scratch.allocate("sums by sample", DType::kF32, {samples * d});
    ops::zero(ctx.stream, by_sample);
    ops::add_rows(ctx.stream, all, by_sample);
    accumulate_sums(ctx, weight, by_sample.view({samples, d}));
  }
  ctx.weights.gradient_done(weight);
}

// From the gradients of the final keys and values to those of their raw heads in d_qkv.
void SelfAttention::key_value_backward(const LayerContext& ctx, const Tensor& qkv, const Tensor& d_kv,
                                       const Tensor& d_qkv) const {
  head_norm_backward(ctx, *k_norm_, final_kv(d_kv, Kind::kKey), raw(qkv, Kind::kKey), raw(d_qkv, Kind::kKey));
  if (!spec_.normed_values) return;  // theirs is there already
  // Values that are the raw keys add to what the keys have left.
  const auto write = spec_.values_from_keys ? ops::Write::kAdd : ops::Write::kSet;
  ops::head_norm_rope_backward(ctx.stream, value_norm(), final_kv(d_kv, Kind::kValue), raw(qkv, Kind::kValue), write,
                               raw(d_qkv, Kind::kValue), Tensor());
}

}  // namespace invar
