#include "layers/self_attention.h"

#include "layers/rms_norm.h"
#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"

namespace invar {
namespace {

// Raw heads of k and v per KV group.
int64_t raw_kv_heads(const AttentionSpec& spec) {
  return spec.borrows ? 0 : (spec.values_from_keys ? 1 : 2);
}

// Rows per KV group of this rank: [q heads of the group, k, v], without what the layer has not.
WeightId add_qkv(ParameterTable& table, Communicator* replicas, const AttentionSpec& spec, const HeadCut& cut) {
  const int64_t d = spec.head_dim;
  const HeadPartition& heads = cut.mine();
  const int64_t group_rows = (heads.heads_per_group + raw_kv_heads(spec)) * d;
  Parameter q;
  q.name = spec.prefix + "q_proj.weight";
  q.shape = {spec.query_heads * d, spec.hidden_size};
  Parameter k;
  k.name = spec.prefix + "k_proj.weight";
  k.shape = {spec.kv_heads * d, spec.hidden_size};
  k.replicas = replicas;
  // Each copy serves its own query heads; in fixed order their sum comes before the product.
  k.partial_gradient = replicas != nullptr && !table.fixed_order();
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
  weight.leaves = cut.leaf_cut(d, raw_kv_heads(spec));
  if (!spec.borrows) weight.parameters.push_back(std::move(k));
  if (!spec.borrows && !spec.values_from_keys) weight.parameters.push_back(std::move(v));
  return table.add(std::move(weight));
}

WeightId add_out(ParameterTable& table, const AttentionSpec& spec, const HeadCut& cut) {
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
  weight.leaves = cut.leaf_cut(d, 0);
  weight.parameters = {std::move(o)};
  return table.add(std::move(weight));
}

// out (T, C) = the sum of what write(run, term) gives for the runs of all ranks that hold the group (null: this one
// alone). Terms are rounded to out's dtype, and so is their sum.
void sum_over_runs(const LayerContext& ctx, const LeafCut& cut, Communicator* ranks,
                   const std::function<void(Range run, const Tensor& term)>& write, const Tensor& out) {
  const ArenaScope scope(ctx.scratch);
  const Tensor term = ctx.scratch.allocate("term of a run", out.dtype(), {out.dim(0), out.dim(1)});
  const Tensor flat = term.view({term.numel()});
  std::vector<Tensor> nodes;
  for (int buffer = 0; buffer < cut.program.buffers; ++buffer) {
    nodes.push_back(ctx.scratch.allocate("sum over runs", DType::kF32, {term.numel()}));
  }
  size_t run = 0;
  for (LeafSum sum(cut.program, nodes); !sum.finished(); sum.leaf_done(ctx.stream)) {
    write(cut.rows[run++], term);
    if (sum.accumulate()) {
      ops::add(ctx.stream, sum.target(), flat, sum.target());
    } else {
      ops::copy(ctx.stream, flat, sum.target());
    }
  }
  nodes.resize(cut.program.nodes.size());
  const Tensor root = out.view({out.numel()});
  if (ranks == nullptr) return ops::copy(ctx.stream, nodes.front(), root);
  tree_all_reduce(ctx.stream, *ranks, cut.plan, nodes, root, ctx.scratch);
}

}  // namespace

SelfAttention::SelfAttention(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec,
                             const ops::RopeTable& rope)
    : spec_(spec),
      cut_(table.cut_heads(spec.query_heads, spec.kv_heads, *replicas.tensor())),
      heads_(cut_.mine()),
      runs_(cut_.runs()),
      kv_replicas_(replicas.kv_heads(spec.query_heads, spec.kv_heads)),
      rope_(rope),
      qkv_(add_qkv(table, kv_replicas_, spec, cut_)),
      out_(add_out(table, spec, cut_)),
      // Every rank sees its own heads only, with or without sequence parallelism.
      q_norm_(
          add_replicated_vector(table, replicas, spec.prefix + "q_norm.weight", spec.head_dim, true,
                                {VectorTerms::Of::kHeads, heads_.query_heads.size(), cut_.query_heads_of_ranks()})) {
  INVAR_CHECK(spec.normed_values || (!spec.borrows && !spec.values_from_keys),
              "{}: values that are shared or taken from the keys are normed", spec.prefix);
  if (!spec.borrows) {
    k_norm_ = add_replicated_vector(table, replicas, spec.prefix + "k_norm.weight", spec.head_dim, true,
                                    {VectorTerms::Of::kHeads, heads_.kv_heads.size(), cut_.kv_heads_of_ranks()});
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

// Of the held query heads of each group.
ops::HeadView SelfAttention::of_run(ops::HeadView view, Range run) {
  view.heads_per_group = run.size();
  view.offset += run.begin * view.head_dim;
  return view;
}

// (T, heads of the run): their statistics lie side by side.
Tensor SelfAttention::lse_of_run(const Tensor& lse, Range run) const {
  const int64_t per_head = lse.dim(0) * heads_.kv_heads.size();
  const Tensor part = lse.view({lse.numel()}).rows(run.begin * per_head, run.end * per_head);
  return part.view({lse.dim(0), heads_.kv_heads.size() * run.size()});
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
  return ops::explain_attention(ctx.stream.device(), params(ctx),
                                of_run(per_head(without_memory(query_width())), runs_.front()),
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
    for (const Range& run : runs_) {
      const ops::HeadView q = of_run(heads.q, run);
      ops::choose_attention(ctx.stream.device(), params(ctx), q, heads.k)
          .forward(ctx.stream, params(ctx), q, heads.k, heads.v, of_run(per_head(saved.out), run),
                   lse_of_run(saved.lse, run));
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

    const Heads heads = prepare(ctx, saved.qkv, shared);
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
  const int64_t tokens = ctx.region.tokens();
  const auto run_backward = [&](Range run, const ops::HeadView& d_k_of_run, const ops::HeadView& d_v_of_run) {
    const ArenaScope scope(ctx.scratch);
    const Tensor lse = lse_of_run(saved.lse, run);
    const Tensor delta = ctx.scratch.allocate("delta", DType::kF32, {tokens, lse.dim(1)});
    const ops::HeadView q = of_run(heads.q, run);
    ops::choose_attention(ctx.stream.device(), params(ctx), q, heads.k)
        .backward(ctx.stream, params(ctx), q, heads.k, heads.v, of_run(per_head(saved.out), run), lse,
                  of_run(d_out, run), delta, of_run(d_q, run), d_k_of_run, d_v_of_run);
  };
  const LeafCut* const sum = cut_.run_sum();
  const bool side_by_side = spec_.normed_values || sum != nullptr;
  const int64_t width = heads_.kv_heads.size() * (side_by_side ? 2 : 1) * spec_.head_dim;
  const Tensor d_kv = ctx.scratch.allocate("d_k, d_v", ctx.activation, {tokens, width});
  const auto write = [&](Range run, const Tensor& to) {
    run_backward(run, final_kv(to, Kind::kKey), side_by_side ? final_kv(to, Kind::kValue) : d_v);
  };
  if (sum == nullptr) {
    write(runs_.front(), d_kv);
    return d_kv;
  }
  sum_over_runs(ctx, *sum, kv_replicas_, write, d_kv);
  if (!spec_.normed_values) ops::copy_heads(ctx.stream, final_kv(d_kv, Kind::kValue), d_v);
  return d_kv;
}

void SelfAttention::head_norm_backward(const LayerContext& ctx, Kind kind, const ops::HeadView& d_out,
                                       const Tensor& qkv, const Tensor& d_qkv) const {
  const WeightId weight = kind == Kind::kQuery ? q_norm_ : *k_norm_;
  const ops::HeadNormRope norm = head_norm(ctx, ctx.weights.acquire_backward(weight));
  ctx.weights.accumulate(ctx.stream, weight, {0, ctx.region.tokens()}, [&](Range, const Tensor& d_weight) {
    ops::head_norm_rope_backward(ctx.stream, norm, d_out, raw(qkv, kind), ops::Write::kSet, raw(d_qkv, kind), d_weight);
  });
  ctx.weights.gradient_done(weight);
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
