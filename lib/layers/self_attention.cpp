#include "layers/self_attention.h"

#include "layers/rms_norm.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

// Raw heads of k and v per KV group.
int64_t raw_kv_heads(const AttentionSpec& spec) {
  return spec.borrows ? 0 : (spec.values_from_keys ? 1 : 2);
}

// Rows per KV group of this rank: [q heads of the group, k, v], without what the layer has not.
ColumnParallelLinear add_qkv(const LayerSetup& setup, Communicator* replicas, const AttentionSpec& spec,
                             const HeadCut& cut) {
  const int64_t d = spec.head_dim;
  const HeadPartition& heads = cut.mine();
  const int64_t group_rows = (heads.heads_per_group + raw_kv_heads(spec)) * d;
  Parameter q;
  q.name = spec.prefix + "q_proj.weight";
  q.shape = {spec.query_heads * d, spec.hidden_size};
  Parameter k;
  k.name = spec.prefix + "k_proj.weight";
  k.shape = {spec.kv_heads * d, spec.hidden_size};
  setup.sums.set_copies(k, replicas, true);  // each serves its own query heads
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
  if (!spec.borrows) weight.parameters.push_back(std::move(k));
  if (!spec.borrows && !spec.values_from_keys) weight.parameters.push_back(std::move(v));
  return {setup.table.add(std::move(weight)), cut.dim(d, raw_kv_heads(spec))};
}

RowParallelLinear add_out(const LayerSetup& setup, const AttentionSpec& spec, const HeadCut& cut) {
  const int64_t d = spec.head_dim;
  const HeadPartition& heads = cut.mine();
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
  return {setup.table.add(std::move(weight)), cut.dim(d, 0)};
}

}  // namespace

SelfAttention::SelfAttention(const LayerSetup& setup, const AttentionSpec& spec, const ops::RopeTable& rope)
    : spec_(spec),
      cut_(setup.sums.cut_heads(spec.query_heads, spec.kv_heads, *setup.tensor())),
      heads_(cut_.mine()),
      calls_(cut_.calls()),
      kv_replicas_(setup.groups.kv_heads(spec.query_heads, spec.kv_heads)),
      rope_(rope),
      qkv_(add_qkv(setup, kv_replicas_, spec, cut_)),
      out_(add_out(setup, spec, cut_)),
      // Every rank sees its own heads only, with or without sequence parallelism.
      q_norm_(
          add_replicated_vector(setup, spec.prefix + "q_norm.weight", spec.head_dim, true,
                                {VectorSum::Over::kHeads, heads_.query_heads.size(), cut_.query_heads_of_ranks()})) {
  INVAR_CHECK(spec.normed_values || (!spec.borrows && !spec.values_from_keys),
              "{}: values that are shared or taken from the keys are normed", spec.prefix);
  if (!spec.borrows) {
    k_norm_ = add_replicated_vector(setup, spec.prefix + "k_norm.weight", spec.head_dim, true,
                                    {VectorSum::Over::kHeads, heads_.kv_heads.size(), cut_.kv_heads_of_ranks()});
  } else {  // released files have them, Hugging Face does not write them again
    for (const char* name : {"k_proj.weight", "v_proj.weight", "k_norm.weight"})
      setup.table.add_unused(spec.prefix + name);
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
  return {kv, groups, 1, d, kv.dim(1) / groups, kind == Kind::kValue ? d : 0};
}

ops::AttentionParams SelfAttention::params(const LayerContext& ctx) const {
  return {ctx.sequence_length, static_cast<float>(spec_.scale), spec_.window, ctx.document_starts, ctx.sums.numerics()};
}

// Of queries and keys.
ops::HeadNormRope SelfAttention::head_norm(const LayerContext& ctx, const Tensor& weight) const {
  return {weight, static_cast<float>(spec_.norm_eps), &rope_, ctx.sequence_length, ctx.document_starts};
}

ops::HeadNormRope SelfAttention::value_norm() const {
  return {Tensor(), static_cast<float>(spec_.norm_eps), nullptr, 0, Tensor()};
}

// Fills shared->kv if this layer provides it; otherwise what it makes is saved, or without ctx.keep on top of scratch.
SelfAttention::Heads SelfAttention::prepare(const LayerContext& ctx, const Tensor& qkv, const SharedKv* shared) const {
  const int64_t tokens = ctx.region.tokens();
  Arena& arena = ctx.keep ? ctx.saved : ctx.scratch;
  Heads heads;
  heads.q = per_head(arena.allocate("q rotated", ctx.activation, {tokens, query_width()}));
  ops::head_norm_rope_forward(ctx.stream, head_norm(ctx, ctx.forward_weight(q_norm_).value()), raw(qkv, Kind::kQuery),
                              heads.q);
  const Tensor kv = shared != nullptr ? shared->kv : arena.allocate("k, v", ctx.activation, {tokens, kv_width()});
  heads.k = final_kv(kv, Kind::kKey);
  heads.v = spec_.normed_values ? final_kv(kv, Kind::kValue) : raw(qkv, Kind::kValue);
  if (spec_.borrows) return heads;
  ops::head_norm_rope_forward(ctx.stream, head_norm(ctx, ctx.forward_weight(*k_norm_).value()), raw(qkv, Kind::kKey),
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
  return ops::explain_attention(ctx.stream.device(), params(ctx),
                                calls_.front().queries(per_head(without_memory(query_width()))),
                                calls_.front().keys(final_kv(without_memory(kv_width()), Kind::kKey)));
}

Tensor SelfAttention::forward(const LayerContext& ctx, const Tensor& x, const SharedKv* shared, Saved& saved) const {
  const int64_t tokens = ctx.region.tokens();
  saved.qkv = ctx.saved.allocate("qkv", ctx.activation, {tokens, row()});
  saved.out = ctx.saved.allocate("attention out", ctx.activation, {tokens, query_width()});
  saved.lse = ctx.saved.allocate("attention lse", DType::kF32, {tokens, heads_.query_heads.size()});
  saved.x = qkv_.forward(ctx, x, saved.qkv);
  {
    const ArenaScope scope(ctx.scratch);
    const Heads heads = prepare(ctx, saved.qkv, shared);
    if (ctx.keep) saved.heads = heads;
    for (const HeadCall& call : calls_) {
      const ops::HeadView q = call.queries(heads.q), k = call.keys(heads.k);
      ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
          .forward(ctx.stream, params(ctx), q, k, call.keys(heads.v), call.queries(per_head(saved.out)),
                   call.statistics(saved.lse));
    }
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

    const Heads heads = ctx.keep ? saved.heads : prepare(ctx, saved.qkv, shared);
    // Query heads side by side, as attention wants them, and not yet among those of d_qkv.
    const auto d_q = per_head(ctx.scratch.allocate("d_q", ctx.activation, {tokens, query_width()}));
    const Tensor d_kv = attention_backward(ctx, heads, saved, per_head(d_out), d_q, raw(d_qkv, Kind::kValue));

    head_norm_backward(ctx, Kind::kQuery, d_q, saved.qkv, d_qkv);
    if (shared != nullptr) ops::add(ctx.stream, shared->d_kv, d_kv, shared->d_kv);
    if (!spec_.borrows) {
      if (shared != nullptr) ops::copy(ctx.stream, shared->d_kv, d_kv);
      key_value_backward(ctx, saved.qkv, d_kv, d_qkv);
    }
  }
  return qkv_.backward(ctx, x, d_qkv);
}

// Returns d_kv (T, C): per KV head the gradient of k and, if values are normed, that of v, which else goes to d_v.
Tensor SelfAttention::attention_backward(const LayerContext& ctx, const Heads& heads, const Saved& saved,
                                         const ops::HeadView& d_out, const ops::HeadView& d_q,
                                         const ops::HeadView& d_v) const {
  KvGradients d_kv(ctx, cut_, kv_replicas_, spec_.head_dim, spec_.normed_values ? nullptr : &d_v);
  for (const HeadCall& call : calls_) {
    const ArenaScope scope(ctx.scratch);
    const Tensor delta = ctx.scratch.allocate("delta", DType::kF32, {ctx.region.tokens(), call.query_heads()});
    const ops::HeadView q = call.queries(heads.q), k = call.keys(heads.k);
    ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
        .backward(ctx.stream, params(ctx), q, k, call.keys(heads.v), call.queries(per_head(saved.out)),
                  call.statistics(saved.lse), call.queries(d_out), delta, call.queries(d_q), d_kv.keys(call),
                  d_kv.values(call));
  }
  return d_kv.sum();
}

void SelfAttention::head_norm_backward(const LayerContext& ctx, Kind kind, const ops::HeadView& d_out,
                                       const Tensor& qkv, const Tensor& d_qkv) const {
  const WeightId weight = kind == Kind::kQuery ? q_norm_ : *k_norm_;
  const HeldWeight held = ctx.backward_weight(weight);
  ops::head_norm_rope_backward(ctx.stream, head_norm(ctx, held.value()), d_out, raw(qkv, kind), ops::Write::kSet,
                               raw(d_qkv, kind), ctx.gradients.vector(weight));
  ctx.gradients.done(weight);
}

// From the gradients of the final keys and values to those of their raw heads in d_qkv.
void SelfAttention::key_value_backward(const LayerContext& ctx, const Tensor& qkv, const Tensor& d_kv,
                                       const Tensor& d_qkv) const {
  head_norm_backward(ctx, Kind::kKey, final_kv(d_kv, Kind::kKey), qkv, d_qkv);
  if (!spec_.normed_values) return;  // theirs is there already
  // Values that are the raw keys add to what the keys have left.
  const auto write = spec_.values_from_keys ? ops::Write::kAdd : ops::Write::kSet;
  ops::head_norm_rope_backward(ctx.stream, value_norm(), final_kv(d_kv, Kind::kValue), raw(qkv, Kind::kValue), write,
                               raw(d_qkv, Kind::kValue), Tensor());
}

}  // namespace invar
