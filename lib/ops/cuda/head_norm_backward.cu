#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/head_norm.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

// The pairs of a token and a head that one sum of d_weight is over, and the blocks (blockIdx.x, *) that share them.
// Either all pairs, or those of one head and a run of tokens: blockIdx.x counts heads, then runs, so that the heads of
// a token are read at the same time, while the sums lie one run after another for each head.
struct PairsOfSum {
  __device__ int64_t sum() const { return blockIdx.x % heads * (gridDim.x / heads) + blockIdx.x / heads; }
  __device__ int64_t pair(int64_t i) const {
    return blockIdx.x / heads * (count * heads) + i * heads + blockIdx.x % heads;
  }
  // The block's row of partial sums.
  __device__ float* partials(float* all, int head_dim) const {
    return all + (sum() * gridDim.y + blockIdx.y) * head_dim;
  }

  int64_t count;   // of a sum
  uint32_t heads;  // that are summed apart, or 1
};

template <class T>
struct BackwardArgs {
  HeadRows<const T> d_out;
  HeadRows<const T> in;
  HeadRows<T> d_in;
  const T* weight;
  float* partials;  // (gridDim.x, gridDim.y, head_dim), null without a weight
  float eps;
  Rotation rotation;
  bool add;
  PairsOfSum pairs;
  uint32_t heads;
};

// The block's row of partial sums of d_weight, over its heads: those of a warp by halving, then warps in ascending
// order.
template <int kLanes, class Mine>
__device__ void write_partials(const Mine& part, typename Mine::Floats& terms, float* out) {
  extern __shared__ __align__(16) float of_warps[];  // (kHeadWarps, head_dim)
  const int head_dim = 2 * part.half;
  float* own = of_warps + threadIdx.x / 32 * head_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int p = 0; p < std::extent_v<typename Mine::Floats, 1>; ++p) {
#pragma unroll
      for (int i = 0; i < Mine::kWidth; ++i) {
#pragma unroll
        for (int offset = kLanes; offset < 32; offset *= 2) {
          terms[h][p][i] += __shfl_xor_sync(0xffffffffu, terms[h][p][i], offset);
        }
      }
      if (threadIdx.x % 32 < kLanes && part.has(p)) store_pack(own + h * part.half + part.at(p), terms[h][p]);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += kHeadThreads) {
    float sum = 0;
    for (int warp = 0; warp < kHeadWarps; ++warp) sum += of_warps[warp * head_dim + c];
    out[c] = sum;
  }
}

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kHeadThreads, kPacks == 1 ? 3 : 1) head_norm_backward_kernel(BackwardArgs<T> args) {
  using Mine = Part<T, kLanes, kPacks>;
  constexpr int64_t kHeads = kHeadThreads / kLanes;  // at a time
  const Mine part(args.in.head_dim);
  const bool weighted = args.weight != nullptr;
  typename Mine::Packs weight = {};
  part.read(weighted, args.weight, weight);
  typename Mine::Floats terms = {};
  for (int64_t first = blockIdx.y * kHeads; first < args.pairs.count; first += gridDim.y * kHeads) {
    const int64_t i = first + threadIdx.x / kLanes;
    const bool valid = i < args.pairs.count;
    const TokenHead at(valid ? args.pairs.pair(i) : 0, args.heads);
    typename Mine::Packs x = {}, d_out = {}, before = {};
    part.read(valid, args.in.row(at.token, at.head), x);
    part.read(valid, args.d_out.row(at.token, at.head), d_out);
    T* d_in = args.d_in.row(at.token, at.head);
    part.read(valid && args.add, d_in, before);

    typename Mine::Floats normed;  // the gradient of the normed head
    Mine::unpack(d_out, normed);
    if (args.rotation.cos != nullptr) part.template rotate<true>(args.rotation, args.rotation.row(at.token), normed);
    float squares = 0, products = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < Mine::kWidth; ++i) {
          squares = fmaf(x[h][p][i], x[h][p][i], squares);
          products = fmaf(normed[h][p][i] * (weighted ? weight[h][p][i] : 1.0f), x[h][p][i], products);
        }
      }
    }
    squares = lane_sum<kLanes>(squares);
    const float rstd = valid ? reciprocal_rms(squares, args.in.head_dim, args.eps) : 0.0f;
    const float mean = lane_sum<kLanes>(products) * rstd / static_cast<float>(args.in.head_dim);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        forget_floats(x[h][p]);
        forget_floats(weight[h][p]);
        float values[Mine::kWidth];
#pragma unroll
        for (int i = 0; i < Mine::kWidth; ++i) {
          const float u = x[h][p][i] * rstd;
          const float g = normed[h][p][i] * (weighted ? weight[h][p][i] : 1.0f);
          values[i] = fmaf(rstd, fmaf(-u, mean, g), before[h][p][i]);
          terms[h][p][i] = fmaf(normed[h][p][i], u, terms[h][p][i]);
        }
        if (valid && part.has(p)) store_pack(d_in + h * part.half + part.at(p), values);
      }
    }
  }
  if (weighted) write_partials<kLanes>(part, terms, args.pairs.partials(args.partials, args.in.head_dim));
}

// One warp per block; it sums the terms of d_weight in its row of partials.
template <class T>
__global__ void __launch_bounds__(32) plain_head_norm_backward_kernel(BackwardArgs<T> args) {
  const int head_dim = args.in.head_dim;
  const int half = (head_dim + 1) / 2;
  float* terms = args.weight == nullptr ? nullptr : args.pairs.partials(args.partials, head_dim);
  const auto weight = [&](int i) { return args.weight == nullptr ? 1.0f : load(args.weight[i]); };
  for (int64_t p = blockIdx.y; p < args.pairs.count; p += gridDim.y) {
    const TokenHead at(args.pairs.pair(p), args.heads);
    const T* x = args.in.row(at.token, at.head);
    const T* d_out = args.d_out.row(at.token, at.head);
    T* d_in = args.d_in.row(at.token, at.head);
    const int64_t angles = args.rotation.cos == nullptr ? 0 : args.rotation.row(at.token);
    // The gradients of normed elements i and, if there is one, i + half.
    const auto rotate_back = [&](int i) {
      const float a = load(d_out[i]);
      const float b = i + half < head_dim ? load(d_out[i + half]) : 0.0f;
      if (args.rotation.cos == nullptr) return make_float2(a, b);
      const float c = args.rotation.cos[angles + i], s = args.rotation.sin[angles + i];
      return make_float2(fmaf(a, c, b * s), fmaf(b, c, -(a * s)));
    };
    float squares = 0, products = 0;
    const auto add_products = [&](int i, float d_normed) {
      squares = fmaf(load(x[i]), load(x[i]), squares);
      products = fmaf(d_normed * weight(i), load(x[i]), products);
    };
    for_lane(half, [&](int i) {
      const float2 d_normed = rotate_back(i);
      add_products(i, d_normed.x);
      if (i + half < head_dim) add_products(i + half, d_normed.y);
    });
    const float rstd = reciprocal_rms(lane_sum(squares), head_dim, args.eps);
    const float mean = lane_sum(products) * rstd / static_cast<float>(head_dim);
    const auto write = [&](int i, float d_normed) {
      const float u = load(x[i]) * rstd;
      const float before = args.add ? load(d_in[i]) : 0.0f;
      store(d_in[i], fmaf(rstd, fmaf(-u, mean, d_normed * weight(i)), before));
      if (terms != nullptr) terms[i] = fmaf(d_normed, u, p == blockIdx.y ? 0.0f : terms[i]);
    };
    for_lane(half, [&](int i) {
      const float2 d_normed = rotate_back(i);
      write(i, d_normed.x);
      if (i + half < head_dim) write(i + half, d_normed.y);
    });
  }
}

// Blocks that share the pairs of a sum, `at_a_time` each. Of all heads together: enough to fill a GPU, few enough that
// their partial sums are little beside the heads. Sums of one head fill it together, so a block of theirs has more
// pairs. It depends on the pairs of one sum alone, as the sum's bits do.
int64_t count_blocks(const PairsOfSum& pairs, bool apart, int64_t at_a_time, int64_t most) {
  constexpr int64_t kApart = 128;
  return std::min(ceil_div(pairs.count, apart ? std::max(at_a_time, kApart) : at_a_time), most);
}

template <class T>
void run_backward(const Stream& stream, HeadShape shape, BackwardArgs<T> args, const Tensor& d_weight) {
  constexpr auto kOp = "head_norm_rope_backward";
  constexpr int64_t kMostBlocks = 792;
  constexpr int64_t kMostPlainBlocks = 4096;
  if (args.pairs.count == 0) return;
  const bool plain = shape.lanes == 0;
  const bool apart = d_weight.defined() && d_weight.dims() == 3;
  const int64_t sums = apart ? d_weight.dim(0) * d_weight.dim(1) : 1;
  const int64_t blocks = plain ? count_blocks(args.pairs, apart, 1, kMostPlainBlocks)
                               : count_blocks(args.pairs, apart, kHeadThreads / shape.lanes, kMostBlocks);
  const int64_t row_bytes = args.in.head_dim * static_cast<int64_t>(sizeof(float));
  if (d_weight.defined()) args.partials = static_cast<float*>(stream.cuda().workspace(sums * blocks * row_bytes));
  const dim3 grid(static_cast<unsigned>(sums), static_cast<unsigned>(blocks));
  if (plain) {
    plain_head_norm_backward_kernel<<<grid, 32, 0, cuda_handle(stream)>>>(args);
  } else {
    const size_t shared = d_weight.defined() ? static_cast<size_t>(kHeadWarps * row_bytes) : 0;
    visit_shape(shape, [&](auto lanes, auto packs) {
      head_norm_backward_kernel<T, lanes(), packs()><<<grid, kHeadThreads, shared, cuda_handle(stream)>>>(args);
    });
  }
  check_launch(kOp);
  if (!d_weight.defined()) return;
  add_column_sums(stream, kOp, args.partials, sums, blocks, args.in.head_dim, d_weight.data<float>());
}

}  // namespace

void head_norm_rope_backward(const Stream& stream, const HeadNormRope& params, const HeadView& d_out,
                             const HeadView& in, Write write, const HeadView& d_in, const Tensor& d_weight) {
  const bool apart = d_weight.defined() && d_weight.dims() == 3;
  const PairsOfSum pairs = apart ? PairsOfSum{in.tokens() / d_weight.dim(1), static_cast<uint32_t>(in.heads())}
                                 : PairsOfSum{in.tokens() * in.heads(), 1};
  visit_float("head_norm_rope_backward", in.buffer.dtype(), [&]<class S>(std::type_identity<S>) {
    using T = Element<S>;
    const BackwardArgs<T> args{HeadRows<const T>(d_out, elements<S>(d_out.buffer)),
                               HeadRows<const T>(in, elements<S>(in.buffer)),
                               HeadRows<T>(d_in, elements<S>(d_in.buffer)),
                               elements<S>(params.weight),
                               nullptr,
                               params.eps,
                               Rotation(params),
                               write == Write::kAdd,
                               pairs,
                               static_cast<uint32_t>(in.heads())};
    run_backward(stream, head_shape<S>("head_norm_rope_backward", params, {&d_out, &in, &d_in}), args, d_weight);
  });
}

}  // namespace invar::ops::cuda
