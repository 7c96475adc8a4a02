#include "layers/lm_head.h"

#include <algorithm>

#include "core/integer.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"

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

Tensor LmHead::loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels, std::optional<float> gradient_scale,
                    const Tensor& loss_sums) const {
  const int64_t tokens = ctx.region.tokens();
  std::unique_ptr<CutProduct> d_x;
  if (gradient_scale) d_x = ctx.sums.product(ctx, table_.dim, x.dim(1));
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.region.gather(ctx.stream, ctx.scratch, x);
    const HeldWeight weight = ctx.weights.use(table_.weight, gradient_scale ? Pass::kBackward : Pass::kForward);
    const int64_t step = ctx.sums.head_chunk(ctx, chunk_tokens(ctx.stream.target(), table_.widest, tokens));
    for (int64_t begin = 0; begin < tokens; begin += step) {
      const Range own{begin, std::min(tokens, begin + step)};
      const ArenaScope chunk_scope(ctx.scratch);
      const Chunk chunk =
          make_logits(ctx, weight.value(), own, x_all.rows(own.begin, own.end), labels.rows(own.begin, own.end));
      add_losses(ctx, chunk, loss_sums);
      if (gradient_scale) chunk_gradient(ctx, weight.value(), chunk, *gradient_scale, *d_x);
    }
  }
  if (!gradient_scale) return {};
  ctx.gradients.done(table_.weight);
  return d_x->sum();
}

LmHead::Chunk LmHead::make_logits(const LayerContext& ctx, const Tensor& weight, Range tokens, const Tensor& x,
                                  const Tensor& labels) const {
  Chunk chunk{tokens, x, labels, {}, {}, {}, {}};
  chunk.logits = ctx.scratch.allocate("logits", DType::kF32, {tokens.size(), table_.rows.size()});
  ctx.sums.multiply(ctx.stream, x, ops::Transpose::kNo, weight, ops::Transpose::kYes, chunk.logits);
  if (softcap_ > 0) ops::softcap(ctx.stream, softcap_, chunk.logits);
  offer(ctx, "logits", chunk.logits, tokens.begin);

  const int64_t n = tokens.size();
  chunk.maximum = ctx.scratch.allocate("logits max", DType::kF32, {n});
  const Tensor sums = ctx.scratch.allocate("sum of exp, target", DType::kF32, {2, n});
  chunk.sum = sums.rows(0, 1).view({n});
  chunk.target = sums.rows(1, 2).view({n});
  ctx.sums.vocabulary_statistics(ctx, table_.dim,
                                 {chunk.logits, labels, table_.rows, table_.vocab_size, chunk.maximum, sums});
  return chunk;
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

void LmHead::chunk_gradient(const LayerContext& ctx, const Tensor& weight, const Chunk& chunk, float scale,
                            CutProduct& d_x) const {
  const Tensor& logits = chunk.logits;
  const Tensor d_logits = ctx.activation == DType::kF32
                              ? logits
                              : ctx.scratch.allocate("d_logits", ctx.activation, {logits.dim(0), logits.dim(1)});
  ops::logits_gradient(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, chunk.maximum, chunk.sum,
                       scale, softcap_, d_logits);
  d_x.multiply_rows(chunk.tokens.begin, d_logits, weight);
  ctx.gradients.add_product(ctx, table_.weight, chunk.tokens, d_logits, chunk.x);
}

}  // namespace invar
