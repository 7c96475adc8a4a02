#include "layers/lm_head.h"

#include <algorithm>

#include "core/integer.h"
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

Tensor LmHead::loss(const LayerContext& ctx, const Tensor& x, const Tensor& labels, std::optional<float> gradient_scale,
                    const Tensor& loss_sum) const {
  const int64_t tokens = ctx.region.tokens();
  Tensor d_x;
  if (gradient_scale) {
    d_x = ctx.scratch.allocate("d_x partial", ctx.region.partial_dtype(ctx.activation), {tokens, x.dim(1)});
  }
  {
    const ArenaScope scope(ctx.scratch);
    const Tensor x_all = ctx.region.gather(ctx.stream, ctx.scratch, x);
    const int64_t step = chunk_tokens(ctx.stream.target(), table_.widest, tokens);
    for (int64_t begin = 0; begin < tokens; begin += step) {
      const int64_t end = std::min(tokens, begin + step);
      const Chunk chunk{x_all.rows(begin, end), labels.rows(begin, end),
                        gradient_scale ? d_x.rows(begin, end) : Tensor()};
      chunk_loss(ctx, chunk, begin, gradient_scale, loss_sum);
    }
  }
  if (!gradient_scale) return {};
  ctx.weights.gradient_done(table_.weight);
  return ctx.region.reduce(ctx.stream, ctx.scratch, d_x, ctx.activation);
}

void LmHead::chunk_loss(const LayerContext& ctx, const Chunk& chunk, int64_t first_token,
                        std::optional<float> gradient_scale, const Tensor& loss_sum) const {
  const ArenaScope scope(ctx.scratch);
  const int64_t n = chunk.x.dim(0);
  Communicator& group = ctx.region.group();
  const Tensor weight = ctx.weights.acquire_forward(table_.weight);

  const Tensor logits = ctx.scratch.allocate("logits", DType::kF32, {n, table_.rows.size()});
  ops::matmul(ctx.stream, chunk.x, ops::Transpose::kNo, weight, ops::Transpose::kYes, logits);
  if (softcap_ > 0) ops::softcap(ctx.stream, softcap_, logits);
  offer(ctx, "logits", logits, first_token);

  const Tensor maximum = ctx.scratch.allocate("logits max", DType::kF32, {n});
  const Tensor sums = ctx.scratch.allocate("sum of exp, target", DType::kF32, {2, n});
  const Tensor sum = sums.rows(0, 1).view({n});
  const Tensor target = sums.rows(1, 2).view({n});
  ops::logits_statistics(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, maximum, sum, target);
  if (group.size() > 1) {
    const Tensor own = ctx.scratch.allocate("own logits max", DType::kF32, {n});
    ops::copy(ctx.stream, maximum, own);
    group.all_reduce(ctx.stream, maximum, ReduceOp::kMax);
    ops::rescale_sum_exp(ctx.stream, own, maximum, sum);
    group.all_reduce(ctx.stream, sums, ReduceOp::kSum);
  }

  const Tensor losses = ctx.scratch.allocate("token losses", DType::kF32, {n});
  ops::token_losses(ctx.stream, chunk.labels, maximum, sum, target, losses);
  ops::add_sum(ctx.stream, losses, loss_sum);
  if (!gradient_scale) return;

  const Tensor d_logits = ctx.activation == DType::kF32
                              ? logits
                              : ctx.scratch.allocate("d_logits", ctx.activation, {n, table_.rows.size()});
  ops::logits_gradient(ctx.stream, logits, chunk.labels, table_.rows, table_.vocab_size, maximum, sum, *gradient_scale,
                       softcap_, d_logits);
  ops::matmul(ctx.stream, d_logits, ops::Transpose::kNo, ctx.weights.acquire_backward(table_.weight),
              ops::Transpose::kNo, chunk.d_x);
  ops::matmul(ctx.stream, d_logits, ops::Transpose::kYes, chunk.x, ops::Transpose::kNo,
              ctx.weights.gradient(table_.weight), 1.0f);
}

}  // namespace invar
