#include "ops/per_layer_input.h"

#include <bit>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

// A pair (token, layer) is a row of w columns. threadIdx.x runs along the packs of a row, threadIdx.y along pairs, of
// which a thread loads a few together. The order of a sum over columns depends on their number alone, and that of a sum
// over pairs on theirs: not on w, which is a rank's share, nor on where columns lie in memory.
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

// Columns of a row that one sum is over.
struct Leaf {
  uint32_t begin, width;
};

// The N elements of a row at column c of a leaf, zeros beyond its end, which change no sum.
template <int N, bool kAligned, class T>
__device__ Pack<T, N> load_columns(const T* row, Leaf leaf, uint32_t c) {
  if constexpr (kAligned) {
    return load_pack<N>(row + leaf.begin + c);
  } else {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = c + i < leaf.width ? load(row[leaf.begin + c + i]) : 0.0f;
    return make_pack<T>(values);
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(Layout at, Leaf leaf, const T* __restrict__ projected, float* squares) {
  constexpr int N = kVectorWidth<T>;
  constexpr int kPairs = 4;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kPairs;
  float sum[kPairs] = {};
  for (uint32_t c = threadIdx.x * N; c < leaf.width; c += blockDim.x * N) {
    Pack<T, N> p[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k < at.pairs) p[k] = load_columns<N, kAligned>(projected + at.by_token(first + k), leaf, c);
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

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    dots_kernel(Layout at, Leaf leaf, const T* __restrict__ projected, const float* __restrict__ squares,
                const T* __restrict__ weight, const T* __restrict__ d_inputs, float* dots) {
  constexpr int N = kVectorWidth<T>;
  constexpr int kPairs = 2;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kPairs;
  float sum[kPairs] = {};
  for (uint32_t c = threadIdx.x * N; c < leaf.width; c += blockDim.x * N) {
    Pack<T, N> p[kPairs], d[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (first + k >= at.pairs) continue;
      p[k] = load_columns<N, kAligned>(projected + at.by_token(first + k), leaf, c);
      d[k] = load_columns<N, kAligned>(d_inputs + at.by_layer(first + k), leaf, c);
    }
    const Pack<T, N> gain = load_columns<N, kAligned>(weight, leaf, c);
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
  float* partials;  // (runs, parts, w): terms of d_weight
};

// The runs of pairs that a sum of d_weight is over each, cut into equal parts but for the last one of a run.
struct Parts {
  explicit Parts(int64_t all_pairs, int64_t all_runs) : runs(all_runs), run(all_pairs / all_runs) {
    constexpr int64_t kMostParts = 2048, kLeastPairs = 64;
    pairs = std::max(kLeastPairs, ceil_div(run, kMostParts));
    of_run = static_cast<uint32_t>(ceil_div(run, pairs));
  }
  int64_t count() const { return runs * of_run; }

  int64_t runs, run, pairs;
  uint32_t of_run;
};

// Thread rows of a part.
constexpr int kRows = 8;

// threadIdx.z and blockIdx.x count parts, of which thread row y has every kRows-th pair, and blockIdx.y a slab of
// columns. The thread rows' terms of d_weight are joined in ascending order.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(Layout at, Backward<T> to, Parts parts) {
  constexpr int kPairs = 2;
  __shared__ float terms[kThreads * N];
  const uint32_t c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int64_t run = quotient(part, parts.of_run);
  const int64_t begin = run * parts.run + (part - run * parts.of_run) * parts.pairs;
  const int64_t end = min(begin + parts.pairs, (run + 1) * parts.run);
  const int64_t count = parts.runs * parts.of_run;
  float d_weight[N] = {};
  if (c < at.w && part < count) {
    const Pack<T, N> gain = load_pack<N>(to.weight + c);
    for (int64_t first = begin + threadIdx.y; first < end; first += kPairs * kRows) {
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
  // By columns of the slab, a row of them per thread row of a part.
  const unsigned columns = blockDim.x * N;
  float* of_part = terms + threadIdx.z * kRows * columns;
#pragma unroll
  for (int i = 0; i < N; ++i) of_part[threadIdx.y * columns + threadIdx.x * N + i] = d_weight[i];
  __syncthreads();
  if (part >= count) return;
  for (unsigned column = threadIdx.y * blockDim.x + threadIdx.x; column < columns; column += kRows * blockDim.x) {
    const int64_t all = static_cast<int64_t>(blockIdx.y) * columns + column;
    if (all >= at.w) break;
    float sum = 0;
    for (int y = 0; y < kRows; ++y) sum += of_part[y * columns + column];
    to.partials[part * at.w + all] = sum;
  }
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

// How a kernel is launched for a leaf of columns.
template <class T, bool kAligned>
struct LeafLaunch {
  int64_t index;
  Leaf leaf;
  dim3 threads;
};

// f(LeafLaunch) for each leaf, aligned if its columns are whole packs of 16 bytes.
template <class F>
void for_leaves(std::string_view op, const Layout& at, std::span<const Range> leaves,
                std::initializer_list<const Tensor*> tensors, F&& f) {
  visit_float(op, (*tensors.begin())->dtype(), [&]<class T>(std::type_identity<T>) {
    constexpr int N = kVectorWidth<Element<T>>;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const Leaf leaf{static_cast<uint32_t>(leaves[i].begin), static_cast<uint32_t>(leaves[i].size())};
      bool aligned = at.w % N == 0 && leaf.begin % N == 0 && leaf.width % N == 0;
      for (const Tensor* tensor : tensors) aligned = aligned && is_aligned({tensor->raw()});
      const auto index = static_cast<int64_t>(i);
      const dim3 threads = threads_for(leaf.width, N);
      aligned ? f(LeafLaunch<T, true>{index, leaf, threads}) : f(LeafLaunch<T, false>{index, leaf, threads});
    }
  });
}

unsigned blocks_for(const Layout& at, dim3 threads, int pairs_per_thread) {
  return static_cast<unsigned>(ceil_div(at.pairs, int64_t{threads.y} * pairs_per_thread));
}

}  // namespace

void per_layer_squares(const Stream& stream, const PerLayerInputParams& params, const Tensor& projected,
                       const Tensor& squares, std::span<const Range> leaves) {
  constexpr auto kOp = "per_layer_squares";
  const Layout at(params, projected);
  if (squares.empty()) return;
  for_leaves(kOp, at, leaves, {&projected}, [&]<class T, bool kAligned>(const LeafLaunch<T, kAligned>& launch) {
    const auto blocks = blocks_for(at, launch.threads, 4);
    squares_kernel<Element<T>, kAligned><<<blocks, launch.threads, 0, cuda_handle(stream)>>>(
        at, launch.leaf, elements<T>(projected), squares.data<float>() + launch.index * at.pairs);
    check_launch(kOp);
  });
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
                    const Tensor& d_inputs, const Tensor& dots, std::span<const Range> leaves) {
  constexpr auto kOp = "per_layer_dots";
  const auto& [projected, squares, weight] = projection;
  const Layout at(params, projected);
  if (dots.empty()) return;
  for_leaves(kOp, at, leaves, {&projected, &weight, &d_inputs},
             [&]<class T, bool kAligned>(const LeafLaunch<T, kAligned>& launch) {
               const auto blocks = blocks_for(at, launch.threads, 2);
               dots_kernel<Element<T>, kAligned><<<blocks, launch.threads, 0, cuda_handle(stream)>>>(
                   at, launch.leaf, elements<T>(projection.projected), projection.squares.data<float>(),
                   elements<T>(projection.weight), elements<T>(d_inputs), dots.data<float>() + launch.index * at.pairs);
               check_launch(kOp);
             });
}

void per_layer_input_backward(const Stream& stream, const PerLayerInputParams& params,
                              const PerLayerProjection& projection, const Tensor& d_inputs, const Tensor& dots,
                              const Tensor& d_projected, const Tensor& d_looked_up, const Tensor& d_weight) {
  constexpr auto kOp = "per_layer_input_backward";
  const auto& [projected, squares, weight] = projection;
  const Layout at(params, projected);
  if (d_inputs.empty()) return;
  const Parts parts(at.pairs, d_weight.dim(0));
  auto* partials = static_cast<float*>(stream.cuda().workspace(parts.count() * at.w * 4));
  visit_packs(kOp, at, {&projected, &weight, &d_inputs, &d_projected, &d_looked_up},
              [&]<class T, int N>(std::type_identity<T>, std::integral_constant<int, N>) {
                const unsigned x = threads_for(at.w, N).x;
                const dim3 threads(x, kRows, kThreads / kRows / x);
                const auto blocks = static_cast<unsigned>(ceil_div(parts.count(), threads.z));
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
                    <<<dim3(blocks, slabs), threads, 0, cuda_handle(stream)>>>(at, operands, parts);
              });
  check_launch(kOp);
  add_column_sums(stream, kOp, partials, parts.runs, parts.of_run, at.w, d_weight.data<float>());
}

}  // namespace invar::ops::cuda
