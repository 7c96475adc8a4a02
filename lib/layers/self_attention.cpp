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

// out (T, C) = the sum of the terms (T, held runs, C) over the ranks that hold the group (null: this one alone),
// rounded.
void sum_over_runs(const LayerContext& ctx, const LeafCut& cut, Communicator* ranks, const Tensor& terms,
                   const Tensor& out) {
  const int64_t leaves = cut.plan.leaves();
  const std::vector<Range>& held = cut.program.nodes;
  const int64_t first = held.front().begin;
  if (ranks == nullptr) return ops::tree_sum(ctx.stream, node_program(leaves, held.front(), first), terms, out);
  if (cut.plan.one_leaf_each()) {
    const Tensor leaf = terms.view({terms.numel()});
    return tree_all_reduce(ctx.stream, *ranks, cut.plan, {&leaf, 1}, out.view({out.numel()}), ctx.scratch);
  }
  const ArenaScope scope(ctx.scratch);
  std::vector<Tensor> nodes;
  for (const Range& node : held) {
    const Tensor sum = ctx.scratch.allocate("sum over runs", DType::kF32, {out.dim(0), out.dim(1)});
    ops::tree_sum(ctx.stream, node_program(leaves, node, first), terms, sum);
    nodes.push_back(sum.view({sum.numel()}));
  }
  tree_all_reduce(ctx.stream, *ranks, cut.plan, nodes, out.view({out.numel()}), ctx.scratch);
}

}  // namespace

SelfAttention::SelfAttention(ParameterTable& table, ReplicaGroups& replicas, const AttentionSpec& spec,
                             const ops::RopeTable& rope)
    : spec_(spec),
      cut_(table.cut_heads(spec.query_heads, spec.kv_heads, *replicas.tensor())),
      heads_(cut_.mine()),
      parts_(parts_of(cut_)),
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

std::vector<SelfAttention::Part> SelfAttention::parts_of(const HeadCut& cut) {
  const std::vector<Range> runs = cut.runs();
  const int64_t groups = cut.mine().kv_heads.size();
  std::vector<Range> stretches;  // of runs of one length
  for (size_t run = 0; run < runs.size(); ++run) {
    const auto end = static_cast<int64_t>(run) + 1;
    if (run == 0 || runs[run].size() != runs[run - 1].size()) stretches.push_back({end - 1, end});
    stretches.back().end = end;
  }
  std::vector<Part> parts;
  int64_t first = 0;
  const auto add = [&](Range held, Range of_runs) {
    const Range heads{runs[static_cast<size_t>(of_runs.begin)].begin, runs[static_cast<size_t>(of_runs.end) - 1].end};
    parts.push_back({held, heads, of_runs, first});
    first += parts.back().query_heads();
  };
  if (std::ssize(runs) <= groups * std::ssize(stretches)) {
    for (int64_t run = 0; run < std::ssize(runs); ++run) add({0, groups}, {run, run + 1});
  } else {
    for (int64_t group = 0; group < groups; ++group) {
      for (const Range& stretch : stretches) add({group, group + 1}, stretch);
    }
  }
  return parts;
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

// The part's query heads, a group for each of its runs.
ops::HeadView SelfAttention::queries_of(ops::HeadView view, const Part& part) {
  view.offset += part.groups.begin * view.group_stride + part.heads.begin * view.head_dim;
  view.groups = part.groups.size() * part.runs.size();
  view.heads_per_group = part.heads.size() / part.runs.size();
  if (part.runs.size() > 1) view.group_stride = view.heads_per_group * view.head_dim;
  return view;
}

ops::HeadView SelfAttention::keys_of(ops::HeadView view, const Part& part) {
  view.offset += part.groups.begin * view.group_stride;
  view.groups = part.groups.size() * part.runs.size();
  if (part.runs.size() > 1) view.group_stride = 0;
  return view;
}

Tensor SelfAttention::lse_of(const Tensor& lse, const Part& part) {
  const int64_t tokens = lse.dim(0), heads = part.query_heads();
  return lse.view({lse.numel()}).rows(tokens * part.first, tokens * (part.first + heads)).view({tokens, heads});
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

// What a part adds to gradients of keys or values. terms (T, per run what final_kv takes).
ops::HeadView SelfAttention::term_of(const Tensor& terms, const Part& part, Kind kind) const {
  const int64_t group = 2 * spec_.head_dim;
  const int64_t run = heads_.kv_heads.size() * group;
  const int64_t offset =
      part.runs.begin * run + part.groups.begin * group + (kind == Kind::kValue ? spec_.head_dim : 0);
  const int64_t stride = part.runs.size() > 1 ? run : group;
  return {terms, part.groups.size() * part.runs.size(), 1, spec_.head_dim, stride, offset};
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

// Fills shared->kv if this layer provides it; otherwise what it makes is saved, or without ctx.keep on top of scratch.
SelfAttention::Heads SelfAttention::prepare(const LayerContext& ctx, const Tensor& qkv, const SharedKv* shared) const {
  const int64_t tokens = ctx.region.tokens();
  Arena& arena = ctx.keep ? ctx.saved : ctx.scratch;
  Heads heads;
  heads.q = per_head(arena.allocate("q rotated", ctx.activation, {tokens, query_width()}));
  ops::head_norm_rope_forward(ctx.stream, head_norm(ctx, ctx.weights.acquire_forward(q_norm_)), raw(qkv, Kind::kQuery),
                              heads.q);
  const Tensor kv = shared != nullptr ? shared->kv : arena.allocate("k, v", ctx.activation, {tokens, kv_width()});
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
                                queries_of(per_head(without_memory(query_width())), parts_.front()),
                                keys_of(final_kv(without_memory(kv_width()), Kind::kKey), parts_.front()));
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
    for (const Part& part : parts_) {
      const ops::HeadView q = queries_of(heads.q, part), k = keys_of(heads.k, part);
      ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
          .forward(ctx.stream, params(ctx), q, k, keys_of(heads.v, part), queries_of(per_head(saved.out), part),
                   lse_of(saved.lse, part));
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
  const int64_t tokens = ctx.region.tokens();
  const auto part_backward = [&](const Part& part, const ops::HeadView& d_k_of_part, const ops::HeadView& d_v_of_part) {
    const ArenaScope scope(ctx.scratch);
    const Tensor delta = ctx.scratch.allocate("delta", DType::kF32, {tokens, part.query_heads()});
    const ops::HeadView q = queries_of(heads.q, part), k = keys_of(heads.k, part);
    ops::choose_attention(ctx.stream.device(), params(ctx), q, k)
        .backward(ctx.stream, params(ctx), q, k, keys_of(heads.v, part), queries_of(per_head(saved.out), part),
                  lse_of(saved.lse, part), queries_of(d_out, part), delta, queries_of(d_q, part), d_k_of_part,
                  d_v_of_part);
  };
  const LeafCut* const sum = cut_.run_sum();
  const bool side_by_side = spec_.normed_values || sum != nullptr;
  const int64_t width = heads_.kv_heads.size() * (side_by_side ? 2 : 1) * spec_.head_dim;
  const Tensor d_kv = ctx.scratch.allocate("d_k, d_v", ctx.activation, {tokens, width});
  if (sum == nullptr) {
    part_backward(parts_.front(), final_kv(d_kv, Kind::kKey), side_by_side ? final_kv(d_kv, Kind::kValue) : d_v);
    return d_kv;
  }
  {
    const ArenaScope scope(ctx.scratch);
    const int64_t runs = parts_.back().runs.end;
    const Tensor terms = ctx.scratch.allocate("terms of runs", ctx.activation, {tokens, runs * width});
    for (const Part& part : parts_) {
      part_backward(part, term_of(terms, part, Kind::kKey), term_of(terms, part, Kind::kValue));
    }
    sum_over_runs(ctx, *sum, kv_replicas_, terms.view({tokens, runs, width}), d_kv);
  }
  if (!spec_.normed_values) ops::copy_heads(ctx.stream, final_kv(d_kv, Kind::kValue), d_v);
  return d_kv;
}

void SelfAttention::head_norm_backward(const LayerContext& ctx, Kind kind, const ops::HeadView& d_out,
                                       const Tensor& qkv, const Tensor& d_qkv) const {
  const WeightId weight = kind == Kind::kQuery ? q_norm_ : *k_norm_;
  const ops::HeadNormRope norm = head_norm(ctx, ctx.weights.acquire_backward(weight));
  ops::head_norm_rope_backward(ctx.stream, norm, d_out, raw(qkv, kind), ops::Write::kSet, raw(d_qkv, kind),
                               ctx.weights.vector_gradient(weight));
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
