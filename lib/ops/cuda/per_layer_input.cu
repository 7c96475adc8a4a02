#include "ops/per_layer_input.h"

#include <bit>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

// A pair (token, layer) is a row of w columns. threadIdx.x runs along the packs of a row, threadIdx.y along pairs, of
// which a thread loads a few together.
namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kHalfRoot = 0.707106781f;  // 2^(-1/2)

// Index arithmetic of one call.
struct Layout {
  Layout(const PerLayerInputParams& params, const Tensor& projected)
      : tokens(projected.dim(0)),
        pairs(projected.dim(0) * params.layers),
        layers(static_cast<uint32_t>(params.layers)),
        w(static_cast<uint32_t>(projected.dim(1) / params.layers)),
        scale(params.scale),
        eps(params.eps),
        width(static_cast<float>(params.width)) {}

  // First column of a pair in (T, L · w) and in (L · T, w).
  __device__ int64_t by_token(int64_t pair) const { return pair * w; }
  __device__ int64_t by_layer(int64_t pair) const {
    const int64_t token = quotient(pair, layers);
    return ((pair - token * layers) * tokens + token) * w;
  }
  __device__ float rstd(float squares) const { return 1.0f / sqrtf(squares / width + eps); }

  int64_t tokens, pairs;
  uint32_t layers, w;
  float scale, eps, width;
};

// The sum over threadIdx.x, a power of two up to 32; the whole warp calls it.
__device__ float row_total(float value) {
  for (unsigned offset = blockDim.x / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) squares_kernel(Layout at, const T* __restrict__ projected, float* squares) {
  constexpr int kPairs = 4;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kPairs;
  float sum[kPairs] = {};
  for (uint32_t c = threadIdx.x * N; c < at.w; c += blockDim.x * N) {
    Pack<T, N> p[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k < at.pairs) p[k] = load_pack<N>(projected + at.by_token(first + k) + c);
    }
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float term = p[k][i] * at.scale;
        sum[k] = fmaf(term, term, sum[k]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const float total = row_total(sum[k]);
    if (threadIdx.x == 0 && first + k < at.pairs) squares[first + k] = total;
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    dots_kernel(Layout at, const T* __restrict__ projected, const float* __restrict__ squares,
                const T* __restrict__ weight, const T* __restrict__ d_inputs, float* dots) {
  constexpr int kPairs = 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kPairs;
  float sum[kPairs] = {};
  for (uint32_t c = threadIdx.x * N; c < at.w; c += blockDim.x * N) {
    Pack<T, N> p[kPairs], d[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
      p[k] = load_pack<N>(projected + at.by_token(first + k) + c);
      d[k] = load_pack<N>(d_inputs + at.by_layer(first + k) + c);
    }
    const Pack<T, N> gain = load_pack<N>(weight + c);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
      const float rstd = at.rstd(squares[first + k]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum[k] = fmaf(d[k][i] * kHalfRoot * gain[i], p[k][i] * at.scale * rstd, sum[k]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const float total = row_total(sum[k]);
    if (threadIdx.x == 0 && first + k < at.pairs) dots[first + k] = total;
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Layout at, const T* __restrict__ projected, const float* __restrict__ squares,
                   const T* __restrict__ weight, const T* __restrict__ looked_up, T* __restrict__ inputs) {
  constexpr int kPairs = 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kPairs;
  for (uint32_t c = threadIdx.x * N; c < at.w; c += blockDim.x * N) {
    Pack<T, N> p[kPairs], e[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
      p[k] = load_pack<N>(projected + at.by_token(first + k) + c);
      e[k] = load_pack<N>(looked_up + at.by_token(first + k) + c);
    }
    const Pack<T, N> gain = load_pack<N>(weight + c);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
      const float rstd = at.rstd(squares[first + k]);
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = fmaf(p[k][i] * at.scale * rstd, gain[i], e[k][i]) * kHalfRoot;
      store_pack(inputs + at.by_layer(first + k) + c, out);
    }
  }
}

// Of the backward pass; null pointers are not read.
template <class T>
struct Backward {
  const T* projected;
  const float* squares;
  const T* weight;
  const T* d_inputs;
  const float* dots;
  T* d_projected;  // may be projected
  T* d_looked_up;
  float* partials;  // (blocks, w): a block's terms of d_weight
};

// A block has pairs_per_block pairs, thread row y every blockDim.y-th of them, and blockIdx.y a slab of columns. The
// thread rows' terms of d_weight are joined in ascending order.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(Layout at, Backward<T> to, int64_t pairs_per_block) {
  constexpr int kPairs = 2;
  __shared__ float terms[kThreads * N];
  const uint32_t c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  const int64_t begin = blockIdx.x * pairs_per_block;
  const int64_t end = min(at.pairs, begin + pairs_per_block);
  float d_weight[N] = {};
  if (c < at.w) {
    const Pack<T, N> gain = load_pack<N>(to.weight + c);
    for (int64_t first = begin + threadIdx.y; first < end; first += kPairs * blockDim.y) {
      Pack<T, N> p[kPairs], d[kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int64_t pair = first + k * blockDim.y;
        if (pair >= end) continue;
        p[k] = load_pack<N>(to.projected + at.by_token(pair) + c);
        d[k] = load_pack<N>(to.d_inputs + at.by_layer(pair) + c);
      }
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int64_t pair = first + k * blockDim.y;
        if (pair >= end) continue;
        const float rstd = at.rstd(to.squares[pair]);
        const float mean = to.dots[pair] / at.width;
        float d_p[N], d_e[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float u = p[k][i] * at.scale * rstd;
          d_e[i] = d[k][i] * kHalfRoot;
          d_p[i] = at.scale * rstd * fmaf(-u, mean, d_e[i] * gain[i]);
          d_weight[i] = fmaf(d_e[i], u, d_weight[i]);
        }
        store_pack(to.d_projected + at.by_token(pair) + c, d_p);
        store_pack(to.d_looked_up + at.by_token(pair) + c, d_e);
      }
    }
  }
  // By columns of the slab, a row of them per thread row.
  const unsigned columns = blockDim.x * N;
#pragma unroll
  for (int i = 0; i < N; ++i) terms[threadIdx.y * columns + threadIdx.x * N + i] = d_weight[i];
  __syncthreads();
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (unsigned column = thread; column < columns; column += kThreads) {
    const int64_t all = static_cast<int64_t>(blockIdx.y) * columns + column;
    if (all >= at.w) break;
    float sum = 0;
    for (unsigned y = 0; y < blockDim.y; ++y) sum += terms[y * columns + column];
    to.partials[static_cast<int64_t>(blockIdx.x) * at.w + all] = sum;
  }
}

// d_weight += the sum over the blocks' terms: warp y of a column those of blocks y, y + 32, ...; warps are joined in
// ascending order.
__global__ void __launch_bounds__(1024) weight_kernel(const float* partials, int rows, uint32_t w, float* d_weight) {
  __shared__ float sums[32][32];
  const uint32_t column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < w) {
#pragma unroll 8
    for (int row = static_cast<int>(threadIdx.y); row < rows; row += 32) {
      sum += partials[static_cast<int64_t>(row) * w + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= w) return;
  for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
  d_weight[column] += sum;
}

// Threads of a block for rows of w columns in packs of n.
dim3 threads_for(uint32_t w, int n) {
  const auto packs = std::bit_ceil(static_cast<unsigned>(ceil_div(w, n)));
  const unsigned x = std::min(32u, packs);
  return dim3(x, kThreads / x);
}

// f(std::type_identity<T>, std::integral_constant<int, N>): packs of 16 bytes if rows and buffers allow it, else N = 1.
template <class F>
void visit_packs(std::string_view op, const Layout& at, std::initializer_list<const Tensor*> tensors, F&& f) {
  visit_float(op, (*tensors.begin())->dtype(), [&]<class T>(std::type_identity<T>) {
    constexpr int N = kVectorWidth<Element<T>>;
    bool aligned = at.w % N == 0;
    for (const Tensor* tensor : tensors) aligned = aligned && is_aligned({tensor->raw()});
    if (aligned) return f(std::type_identity<T>{}, std::integral_constant<int, N>{});
    f(std::type_identity<T>{}, std::integral_constant<int, 1>{});
  });
}

unsigned blocks_for(const Layout& at, dim3 threads, int pairs_per_thread) {
  return static_cast<unsigned>(ceil_div(at.pairs, int64_t{threads.y} * pairs_per_thread));
}

}  // namespace

void per_layer_squares(const Stream& stream, const PerLayerInputParams& params, const Tensor& projected,
                       const Tensor& squares) {
  constexpr auto kOp = "per_layer_squares";
  const Layout at(params, projected);
  if (squares.empty()) return;
  visit_packs(kOp, at, {&projected}, [&]<class T, int N>(std::type_identity<T>, std::integral_constant<int, N>) {
    const dim3 threads = threads_for(at.w, N);
    squares_kernel<Element<T>, N><<<blocks_for(at, threads, 4), threads, 0, cuda_handle(stream)>>>(
        at, elements<T>(projected), squares.data<float>());
  });
  check_launch(kOp);
}

void per_layer_input_forward(const Stream& stream, const PerLayerInputParams& params,
                             const PerLayerProjection& projection, const Tensor& looked_up, const Tensor& inputs) {
  constexpr auto kOp = "per_layer_input_forward";
  const auto& [projected, squares, weight] = projection;
  const Layout at(params, projected);
  if (inputs.empty()) return;
  visit_packs(kOp, at, {&projected, &weight, &looked_up, &inputs},
              [&]<class T, int N>(std::type_identity<T>, std::integral_constant<int, N>) {
                const dim3 threads = threads_for(at.w, N);
                forward_kernel<Element<T>, N><<<blocks_for(at, threads, 2), threads, 0, cuda_handle(stream)>>>(
                    at, elements<T>(projection.projected), projection.squares.data<float>(),
                    elements<T>(projection.weight), elements<T>(looked_up), elements<T>(inputs));
              });
  check_launch(kOp);
}

void per_layer_dots(const Stream& stream, const PerLayerInputParams& params, const PerLayerProjection& projection,
                    const Tensor& d_inputs, const Tensor& dots) {
  constexpr auto kOp = "per_layer_dots";
  const auto& [projected, squares, weight] = projection;
  const Layout at(params, projected);
  if (dots.empty()) return;
  visit_packs(kOp, at, {&projected, &weight, &d_inputs},
              [&]<class T, int N>(std::type_identity<T>, std::integral_constant<int, N>) {
                const dim3 threads = threads_for(at.w, N);
                dots_kernel<Element<T>, N><<<blocks_for(at, threads, 2), threads, 0, cuda_handle(stream)>>>(
                    at, elements<T>(projection.projected), projection.squares.data<float>(),
                    elements<T>(projection.weight), elements<T>(d_inputs), dots.data<float>());
              });
  check_launch(kOp);
}

void per_layer_input_backward(const Stream& stream, const PerLayerInputParams& params,
                              const PerLayerProjection& projection, const Tensor& d_inputs, const Tensor& dots,
                              const Tensor& d_projected, const Tensor& d_looked_up, const Tensor& d_weight) {
  constexpr auto kOp = "per_layer_input_backward";
  constexpr int64_t kMostBlocks = 2048, kLeastPairs = 64;
  const auto& [projected, squares, weight] = projection;
  const Layout at(params, projected);
  if (d_inputs.empty()) return;
  const int64_t pairs_per_block = std::max(kLeastPairs, ceil_div(at.pairs, kMostBlocks));
  const auto blocks = static_cast<unsigned>(ceil_div(at.pairs, pairs_per_block));
  auto* partials = static_cast<float*>(stream.cuda().workspace(int64_t{blocks} * at.w * 4));
  visit_packs(kOp, at, {&projected, &weight, &d_inputs, &d_projected, &d_looked_up},
              [&]<class T, int N>(std::type_identity<T>, std::integral_constant<int, N>) {
                const dim3 threads = threads_for(at.w, N);
                const auto slabs = static_cast<unsigned>(ceil_div(at.w, threads.x * N));
                const Backward<Element<T>> operands{elements<T>(projection.projected),
                                                    projection.squares.data<float>(),
                                                    elements<T>(projection.weight),
                                                    elements<T>(d_inputs),
                                                    dots.data<float>(),
                                                    elements<T>(d_projected),
                                                    elements<T>(d_looked_up),
                                                    partials};
                backward_kernel<Element<T>, N>
                    <<<dim3(blocks, slabs), threads, 0, cuda_handle(stream)>>>(at, operands, pairs_per_block);
              });
  check_launch(kOp);
  const auto column_blocks = static_cast<unsigned>(ceil_div(at.w, 32));
  weight_kernel<<<column_blocks, dim3(32, 32), 0, cuda_handle(stream)>>>(partials, static_cast<int>(blocks), at.w,
                                                                         d_weight.data<float>());
  check_launch(kOp);
}

}  // namespace invar::ops::cuda
