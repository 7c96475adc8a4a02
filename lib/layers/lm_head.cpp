#include "layers/lm_head.h"

#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace invar {
namespace {

// Tokens per chunk, so that a chunk's fp32 logits stay near 64 MiB. The same on every rank of the group.
int64_t chunk_tokens(int64_t widest) {
  return std::clamp<int64_t>((16 << 20) / std::max<int64_t>(1, widest), 128, 2048);
}

}  // namespace

LmHead::Result LmHead::loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels,
                            std::optional<float> gradient_scale) const {
  const int64_t tokens = ctx.region.tokens();
  Result result;
  Tensor d_x;
  if (gradient_scale) {
    d_x = ctx.scratch.allocate("d_x partial", ctx.region.partial_dtype(ctx.activation), {tokens, x.dim(1)});
  }
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.region.gather(ctx.stream, ctx.scratch, x);
    const int64_t step = chunk_tokens(table_.widest);
    for (int64_t begin = 0; begin < tokens; begin += step) {
      const int64_t end = std::min(tokens, begin + step);
      const Chunk chunk{x_all.rows(begin, end), labels.rows(begin, end),
                        gradient_scale ? d_x.rows(begin, end) : Tensor()};
      result.loss_sum += chunk_loss(ctx, chunk, begin, gradient_scale);
    }
  }
  if (gradient_scale) {
    ctx.weights.gradient_done(table_.weight);
    result.d_x = ctx.region.reduce(ctx.stream, ctx.scratch, d_x, ctx.activation);
  }
  return result;
}

double LmHead::chunk_loss(const LayerContext& ctx, const Chunk& chunk, int64_t first_token,
                          std::optional<float> gradient_scale) const {
  const ArenaScope scope(ctx.scratch);
  const int64_t n = chunk.x.dim(0);
  Communicator& group = ctx.region.group();
  const Tensor weight = ctx.weights.acquire_forward(table_.weight);

  const Tensor logits = ctx.scratch.allocate("logits", DType::kF32, {n, table_.rows.size()});
  ops::matmul(ctx.stream, chunk.x, ops::Transpose::kNo, weight, ops::Transpose::kYes, logits);
  if (softcap_ > 0) ops::softcap(ctx.stream, softcap_, logits);
  if (ctx.sink != nullptr && ctx.sink->wants("logits")) ctx.sink->record("logits", logits, first_token);

  const Tensor maximum = ctx.scratch.allocate("logits max", DType::kF32, {n});
  ops::logits_max(ctx.stream, logits, table_.rows, table_.vocab_size, maximum);
  group.all_reduce(ctx.stream, maximum, ReduceOp::kMax);

  const Tensor sums = ctx.scratch.allocate("sum of exp, target", DType::kF32, {2, n});
  const Tensor sum = sums.rows(0, 1).view({n});
  const Tensor target = sums.rows(1, 2).view({n});
  ops::logits_sum_exp(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, maximum, sum, target);
  group.all_reduce(ctx.stream, sums, ReduceOp::kSum);

  const Tensor losses = ctx.scratch.allocate("token losses", DType::kF32, {n});
  ops::token_losses(ctx.stream, chunk.labels, maximum, sum, target, losses);
  const double loss = ops::sum(ctx.stream, losses);
  if (!gradient_scale) return loss;

  const Tensor d_logits = ctx.activation == DType::kF32
                              ? logits
                              : ctx.scratch.allocate("d_logits", ctx.activation, {n, table_.rows.size()});
  ops::logits_gradient(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, maximum, sum, *gradient_scale,
                       softcap_, d_logits);
  ops::matmul(ctx.stream, d_logits, ops::Transpose::kNo, ctx.weights.acquire_backward(table_.weight),
              ops::Transpose::kNo, chunk.d_x);
  ops::matmul(ctx.stream, d_logits, ops::Transpose::kYes, chunk.x, ops::Transpose::kNo,
              ctx.weights.gradient(table_.weight), 1.0f);
  return loss;
}

}  // namespace invar
