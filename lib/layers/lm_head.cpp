#include "layers/lm_head.h"

#include <algorithm>

#include "core/integer.h"
#include "layers/group_product.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace invar {
namespace {

// Tokens per chunk: fp32 logits near 64 MiB on the CPU; on a GPU up to 1.25 GiB, since its matrix products want many
// rows, in equal chunks of whole tiles. The same on every rank of the group.
int64_t chunk_tokens(DeviceType device, int64_t widest, int64_t tokens) {
  const int64_t width = std::max<int64_t>(1, widest);
  if (device != DeviceType::kCuda) return std::clamp<int64_t>((16 << 20) / width, 128, 2048);
  constexpr int64_t kTile = 128;
  const int64_t most = std::clamp<int64_t>((320 << 20) / width, kTile, 16384);
  return round_up(ceil_div(tokens, ceil_div(tokens, most)), kTile);
}

}  // namespace

// In fixed order a chunk is a part of a sample that depends on the model alone, or whole samples.
int64_t LmHead::chunk_size(const LayerContext& ctx) const {
  const int64_t any = chunk_tokens(ctx.stream.target(), table_.widest, ctx.region.tokens());
  if (ctx.weights.leaves(table_.weight) == nullptr) return any;
  if (sample_chunk_ < ctx.sequence_length) return sample_chunk_;
  return std::max<int64_t>(1, any / ctx.sequence_length) * ctx.sequence_length;
}

Tensor LmHead::loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels, std::optional<float> gradient_scale,
                    const Tensor& loss_sums) const {
  const int64_t tokens = ctx.region.tokens();
  std::optional<GroupProduct> d_x;
  if (gradient_scale) d_x.emplace(ctx, ctx.weights.leaves(table_.weight), x.dim(1));
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.region.gather(ctx.stream, ctx.scratch, x);
    const int64_t step = chunk_size(ctx);
    for (int64_t begin = 0; begin < tokens; begin += step) {
      const Range own{begin, std::min(tokens, begin + step)};
      const ArenaScope chunk_scope(ctx.scratch);
      const Chunk chunk = make_logits(ctx, own, x_all.rows(own.begin, own.end), labels.rows(own.begin, own.end));
      add_losses(ctx, chunk, loss_sums);
      if (gradient_scale) chunk_gradient(ctx, chunk, *gradient_scale, *d_x);
    }
  }
  if (!gradient_scale) return {};
  ctx.weights.gradient_done(table_.weight);
  return d_x->sum();
}

LmHead::Chunk LmHead::make_logits(const LayerContext& ctx, Range tokens, const Tensor& x, const Tensor& labels) const {
  const Tensor weight = ctx.weights.acquire_forward(table_.weight);
  Chunk chunk{tokens, x, labels, {}, {}, {}, {}};
  chunk.logits = ctx.scratch.allocate("logits", DType::kF32, {tokens.size(), table_.rows.size()});
  ops::matmul(ctx.stream, x, ops::Transpose::kNo, weight, ops::Transpose::kYes, chunk.logits);
  if (softcap_ > 0) ops::softcap(ctx.stream, softcap_, chunk.logits);
  offer(ctx, "logits", chunk.logits, tokens.begin);

  const int64_t n = tokens.size();
  chunk.maximum = ctx.scratch.allocate("logits max", DType::kF32, {n});
  const Tensor sums = ctx.scratch.allocate("sum of exp, target", DType::kF32, {2, n});
  chunk.sum = sums.rows(0, 1).view({n});
  chunk.target = sums.rows(1, 2).view({n});
  const LeafCut* const leaves = ctx.weights.leaves(table_.weight);
  leaves == nullptr ? statistics(ctx, chunk, sums) : statistics_in_order(ctx, chunk, *leaves);
  return chunk;
}

void LmHead::statistics(const LayerContext& ctx, const Chunk& chunk, const Tensor& sums) const {
  Communicator& group = ctx.region.group();
  ops::logits_statistics(ctx.stream, chunk.logits, {0, table_.rows.size()}, chunk.labels, table_.rows,
                         table_.vocab_size, chunk.maximum, chunk.sum, chunk.target);
  if (group.size() == 1) return;
  const Tensor own = ctx.scratch.allocate("own logits max", DType::kF32, {chunk.tokens.size()});
  ops::copy(ctx.stream, chunk.maximum, own);
  group.all_reduce(ctx.stream, chunk.maximum, ReduceOp::kMax);
  ops::rescale_sum_exp(ctx.stream, own, chunk.maximum, chunk.sum);
  group.all_reduce(ctx.stream, sums, ReduceOp::kSum);
}

// The sum of each leaf is a number of its own; maxima are exact in any order, and so is a sum with one term that is not
// zero.
void LmHead::statistics_in_order(const LayerContext& ctx, const Chunk& chunk, const LeafCut& leaves) const {
  Communicator& group = ctx.region.group();
  const int64_t n = chunk.tokens.size();
  std::vector<Tensor> maxima, sums, targets;
  for (size_t leaf = 0; leaf < leaves.rows.size(); ++leaf) {
    for (std::vector<Tensor>* values : {&maxima, &sums, &targets}) {
      values->push_back(ctx.scratch.allocate("of a leaf", DType::kF32, {n}));
    }
    ops::logits_statistics(ctx.stream, chunk.logits, leaves.rows[leaf], chunk.labels, table_.rows, table_.vocab_size,
                           maxima[leaf], sums[leaf], targets[leaf]);
    if (leaf == 0) {
      ops::copy(ctx.stream, maxima[leaf], chunk.maximum);
      ops::copy(ctx.stream, targets[leaf], chunk.target);
    } else {
      ops::maximum(ctx.stream, chunk.maximum, maxima[leaf], chunk.maximum);
      ops::add(ctx.stream, chunk.target, targets[leaf], chunk.target);
    }
  }
  group.all_reduce(ctx.stream, chunk.maximum, ReduceOp::kMax);
  group.all_reduce(ctx.stream, chunk.target, ReduceOp::kSum);
  for (size_t leaf = 0; leaf < leaves.rows.size(); ++leaf) {
    ops::rescale_sum_exp(ctx.stream, maxima[leaf], chunk.maximum, sums[leaf]);
  }
  sum_leaves(ctx, leaves, sums, chunk.sum);
}

void LmHead::add_losses(const LayerContext& ctx, const Chunk& chunk, const Tensor& loss_sums) const {
  const Tensor losses = ctx.scratch.allocate("token losses", DType::kF32, {chunk.tokens.size()});
  ops::token_losses(ctx.stream, chunk.labels, chunk.maximum, chunk.sum, chunk.target, losses);
  const int64_t length = ctx.sequence_length;
  for (int64_t sample = chunk.tokens.begin / length; sample * length < chunk.tokens.end; ++sample) {
    const Range part = intersect(chunk.tokens, {sample * length, (sample + 1) * length});
    ops::add_sum(ctx.stream, losses.rows(part.begin - chunk.tokens.begin, part.end - chunk.tokens.begin),
                 loss_sums.rows(sample, sample + 1));
  }
}

void LmHead::chunk_gradient(const LayerContext& ctx, const Chunk& chunk, float scale, const GroupProduct& d_x) const {
  const Tensor& logits = chunk.logits;
  const Tensor d_logits = ctx.activation == DType::kF32
                              ? logits
                              : ctx.scratch.allocate("d_logits", ctx.activation, {logits.dim(0), logits.dim(1)});
  ops::logits_gradient(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, chunk.maximum, chunk.sum,
                       scale, softcap_, d_logits);
  d_x.multiply_rows(chunk.tokens.begin, d_logits, ctx.weights.acquire_backward(table_.weight));
  ctx.weights.accumulate_product(ctx.stream, ctx.scratch, table_.weight, chunk.tokens, d_logits, chunk.x);
}

}  // namespace invar
