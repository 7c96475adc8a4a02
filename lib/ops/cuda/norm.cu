#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

// A row stays in registers between its sum and what is written: threadIdx.x walks a row in packs of 16 bytes,
// threadIdx.y the rows of a block. Rows that are not whole packs or very wide take the plain kernels, which read a row
// twice and sum it in another order: the width alone decides.
namespace invar::ops::cuda {
namespace {

constexpr int kMostRowThreads = 512;
constexpr int kPlainThreads = 256;

template <class T>
struct ForwardArgs {
  const T* a;  // x, or the first term of it
  const T* b;
  T* sum;
  const T* weight;
  float eps;
  T* y;
  float* rstd;
  int64_t tokens;
  int width;
};

template <class T>
struct BackwardArgs {
  const T* d_y;
  const T* x;
  const T* weight;
  const float* rstd;
  T* d_x;
  float* partials;  // (gridDim.x, gridDim.y, width)
  int64_t run;      // tokens of a sum of d_weight
  int width;
};

// How the threads of a block share rows.
struct RowShape {
  int threads = 0;  // of a row
  int packs = 0;    // of a thread
  int rows = 0;     // of a block
};

// The shape with the fewest idle packs; among those the most packs per thread. No threads if a row is too wide.
RowShape row_shape(int64_t packs_of_row) {
  RowShape best;
  for (const int packs : {4, 2, 1}) {
    const auto threads = round_up(ceil_div(packs_of_row, packs), 32);
    if (threads > kMostRowThreads || (best.threads > 0 && threads * packs >= best.threads * best.packs)) continue;
    best = {static_cast<int>(threads), packs, static_cast<int>(std::max<int64_t>(1, 128 / threads))};
  }
  return best;
}

template <class T, int kPacks, bool kAdd>
__global__ void __launch_bounds__(kMostRowThreads) rms_norm_forward_kernel(ForwardArgs<T> args) {
  constexpr int kWidth = kVectorWidth<T>;
  __shared__ float scratch[kMostRowThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t start = row * args.width;
  const bool valid = row < args.tokens;
  const auto column = [&](int p) { return static_cast<int>(p * blockDim.x + threadIdx.x) * kWidth; };

  Pack<T, kWidth> x[kPacks] = {};
  Pack<T, kWidth> b[kPacks] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!valid || column(p) >= args.width) continue;
    x[p] = load_pack<kWidth>(args.a + start + column(p));
    if (kAdd) b[p] = load_pack<kWidth>(args.b + start + column(p));
  }
  float squares = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (kAdd) {
      float sum[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = x[p][i] + b[p][i];
      x[p] = make_pack<T>(sum);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares = fmaf(x[p][i], x[p][i], squares);
  }
  const float rstd = reciprocal_rms(row_sum(squares, scratch), args.width, args.eps);
  if (valid && threadIdx.x == 0) args.rstd[row] = rstd;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!valid || column(p) >= args.width) continue;
    const auto weight = load_pack<kWidth>(args.weight + column(p));
    float y[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] = x[p][i] * rstd * weight[i];
    if (kAdd) store_pack(args.sum + start + column(p), x[p]);
    store_pack(args.y + start + column(p), y);
  }
}

template <class T, bool kAdd>
__global__ void __launch_bounds__(kPlainThreads) plain_rms_norm_forward_kernel(ForwardArgs<T> args) {
  __shared__ float scratch[kPlainThreads / 32];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * args.width;
  const T* x = (kAdd ? args.sum : args.a) + start;
  float squares = 0;
  for (int c = static_cast<int>(threadIdx.x); c < args.width; c += kPlainThreads) {
    if (kAdd) store(args.sum[start + c], load(args.a[start + c]) + load(args.b[start + c]));
    squares = fmaf(load(x[c]), load(x[c]), squares);
  }
  const float rstd = reciprocal_rms(row_sum(squares, scratch), args.width, args.eps);
  if (threadIdx.x == 0) args.rstd[blockIdx.x] = rstd;
  for (int c = static_cast<int>(threadIdx.x); c < args.width; c += kPlainThreads) {
    store(args.y[start + c], load(x[c]) * rstd * load(args.weight[c]));
  }
}

// The block's row of partial sums of d_weight: those of its threadIdx.y, joined in ascending order.
template <int kPacks, int kWidth>
__device__ void write_partials(float (&terms)[kPacks][kWidth], int width, float* out) {
  extern __shared__ __align__(16) float joined[];  // (width), if the block has several rows
  for (unsigned y = 0; y < blockDim.y; ++y) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = static_cast<int>(p * blockDim.x + threadIdx.x) * kWidth;
      if (threadIdx.y != y || column >= width) continue;
      if (y > 0) {
        const auto before = load_pack<kWidth>(joined + column);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) terms[p][i] += before[i];
      }
      store_pack((y + 1 == blockDim.y ? out : joined) + column, terms[p]);
    }
    __syncthreads();
  }
}

// The block's row of partial sums of d_weight.
template <class T>
__device__ float* own_partials(const BackwardArgs<T>& args) {
  return args.partials + (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * args.width;
}

// A run of tokens has the blocks (blockIdx.x, *), which share its rows.
template <class T, int kPacks, bool kAdd>
__global__ void __launch_bounds__(kMostRowThreads) rms_norm_backward_kernel(BackwardArgs<T> args) {
  constexpr int kWidth = kVectorWidth<T>;
  __shared__ float scratch[2][kMostRowThreads / 32];
  const auto column = [&](int p) { return static_cast<int>(p * blockDim.x + threadIdx.x) * kWidth; };
  Pack<T, kWidth> weight[kPacks] = {};
  float terms[kPacks][kWidth] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column(p) < args.width) weight[p] = load_pack<kWidth>(args.weight + column(p));
  }
  int parity = 0;
  const int64_t begin = blockIdx.x * args.run;
  const int64_t end = begin + args.run;
  for (int64_t first = begin + blockIdx.y * blockDim.y; first < end; first += gridDim.y * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int64_t start = row * args.width;
    const bool valid = row < end;
    Pack<T, kWidth> d_y[kPacks] = {};
    Pack<T, kWidth> x[kPacks] = {};
    Pack<T, kWidth> before[kPacks] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!valid || column(p) >= args.width) continue;
      d_y[p] = load_pack<kWidth>(args.d_y + start + column(p));
      x[p] = load_pack<kWidth>(args.x + start + column(p));
      if (kAdd) before[p] = load_pack<kWidth>(args.d_x + start + column(p));
    }
    const float rstd = valid ? args.rstd[row] : 0.0f;
    float projection = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) projection = fmaf(d_y[p][i] * weight[p][i], x[p][i] * rstd, projection);
    }
    const float mean = row_sum(projection, scratch[parity]) / static_cast<float>(args.width);
    parity ^= 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      forget_floats(d_y[p]);
      forget_floats(x[p]);
      forget_floats(weight[p]);
      float d_x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float u = x[p][i] * rstd;
        d_x[i] = fmaf(rstd, fmaf(-u, mean, d_y[p][i] * weight[p][i]), before[p][i]);
        terms[p][i] = fmaf(d_y[p][i], u, terms[p][i]);
      }
      if (valid && column(p) < args.width) store_pack(args.d_x + start + column(p), d_x);
    }
  }
  write_partials(terms, args.width, own_partials(args));
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads) plain_rms_norm_backward_kernel(BackwardArgs<T> args, bool add) {
  __shared__ float scratch[2][kPlainThreads / 32];
  float* terms = own_partials(args);
  const auto first = static_cast<int>(threadIdx.x);
  for (int c = first; c < args.width; c += kPlainThreads) terms[c] = 0;
  int parity = 0;
  const int64_t begin = blockIdx.x * args.run;
  const int64_t end = begin + args.run;
  for (int64_t row = begin + blockIdx.y; row < end; row += gridDim.y) {
    const T* d_y = args.d_y + row * args.width;
    const T* x = args.x + row * args.width;
    T* d_x = args.d_x + row * args.width;
    const float rstd = args.rstd[row];
    float projection = 0;
    for (int c = first; c < args.width; c += kPlainThreads) {
      projection = fmaf(load(d_y[c]) * load(args.weight[c]), load(x[c]) * rstd, projection);
    }
    const float mean = row_sum(projection, scratch[parity]) / static_cast<float>(args.width);
    parity ^= 1;
    for (int c = first; c < args.width; c += kPlainThreads) {
      const float dy = load(d_y[c]);
      const float u = load(x[c]) * rstd;
      const float before = add ? load(d_x[c]) : 0.0f;
      store(d_x[c], fmaf(rstd, fmaf(-u, mean, dy * load(args.weight[c])), before));
      terms[c] = fmaf(dy, u, terms[c]);
    }
  }
}

// The shape of rows that are read in packs; no threads if they are not.
template <class T>
RowShape packed_shape(std::string_view op, int64_t width, std::initializer_list<const void*> rows) {
  if (width % kVectorWidth<T> != 0) return {};
  const RowShape shape = row_shape(width / kVectorWidth<T>);
  if (shape.threads > 0) expect_aligned(op, rows);
  return shape;
}

// f(constant): the packs of a thread.
template <class F>
void visit_packs(int packs, F&& f) {
  if (packs == 4) return f(std::integral_constant<int, 4>{});
  if (packs == 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

template <bool kAdd, class T>
void run_forward(const Stream& stream, std::string_view op, const ForwardArgs<T>& args) {
  if (args.tokens == 0) return;
  const RowShape shape = packed_shape<T>(op, args.width, {args.a, args.b, args.sum, args.weight, args.y});
  if (shape.threads == 0) {
    plain_rms_norm_forward_kernel<T, kAdd>
        <<<static_cast<unsigned>(args.tokens), kPlainThreads, 0, cuda_handle(stream)>>>(args);
    return check_launch(op);
  }
  const auto blocks = static_cast<unsigned>(ceil_div(args.tokens, shape.rows));
  visit_packs(shape.packs, [&](auto packs) {
    rms_norm_forward_kernel<T, packs(), kAdd>
        <<<blocks, dim3(shape.threads, shape.rows), 0, cuda_handle(stream)>>>(args);
  });
  check_launch(op);
}

// Blocks that share a run of tokens, of so many threads and rows: enough to fill a GPU, few enough that their partial
// sums are little beside the rows. A short run is one of many, which fill it together. It depends on the run alone, as
// the bits of its sum do.
int64_t count_blocks(int64_t run, int threads, int rows) {
  constexpr int64_t kThreads = 528 * 128, kShortRun = 512, kShortPart = 16;
  if (run <= kShortRun) return ceil_div(run, std::max<int64_t>(rows, kShortPart));
  return std::min(ceil_div(run, rows), kThreads / threads);
}

template <class T>
void run_backward(const Stream& stream, std::string_view op, BackwardArgs<T> args, Write write,
                  const Tensor& d_weight) {
  if (args.run == 0) return;
  const RowShape shape = packed_shape<T>(op, args.width, {args.d_y, args.x, args.weight, args.d_x});
  const bool packed = shape.threads > 0;
  const int64_t runs = d_weight.dim(0);
  const int64_t blocks = packed ? count_blocks(args.run, shape.threads * shape.rows, shape.rows)
                                : count_blocks(args.run, kPlainThreads, 1);
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(float));
  args.partials = static_cast<float*>(stream.cuda().workspace(runs * blocks * row_bytes));
  const dim3 grid(static_cast<unsigned>(runs), static_cast<unsigned>(blocks));
  if (packed) {
    const size_t shared = shape.rows > 1 ? static_cast<size_t>(row_bytes) : 0;
    const dim3 block(shape.threads, shape.rows);
    visit_packs(shape.packs, [&](auto packs) {
      if (write == Write::kAdd) {
        rms_norm_backward_kernel<T, packs(), true><<<grid, block, shared, cuda_handle(stream)>>>(args);
      } else {
        rms_norm_backward_kernel<T, packs(), false><<<grid, block, shared, cuda_handle(stream)>>>(args);
      }
    });
  } else {
    plain_rms_norm_backward_kernel<<<grid, kPlainThreads, 0, cuda_handle(stream)>>>(args, write == Write::kAdd);
  }
  check_launch(op);
  add_column_sums(stream, op, args.partials, runs, blocks, args.width, d_weight.data<float>());
}

}  // namespace

void rms_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, float eps, const Tensor& y,
                      const Tensor& rstd) {
  visit_float("rms_norm_forward", x.dtype(), [&]<class T>(std::type_identity<T>) {
    run_forward<false, Element<T>>(stream, "rms_norm_forward",
                                   {elements<T>(x), nullptr, nullptr, elements<T>(weight), eps, elements<T>(y),
                                    rstd.data<float>(), x.dim(0), static_cast<int>(x.dim(1))});
  });
}

void add_rms_norm_forward(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& weight, float eps,
                          const Tensor& sum, const Tensor& y, const Tensor& rstd) {
  visit_float("add_rms_norm_forward", sum.dtype(), [&]<class T>(std::type_identity<T>) {
    run_forward<true, Element<T>>(stream, "add_rms_norm_forward",
                                  {elements<T>(a), elements<T>(b), elements<T>(sum), elements<T>(weight), eps,
                                   elements<T>(y), rstd.data<float>(), sum.dim(0), static_cast<int>(sum.dim(1))});
  });
}

void rms_norm_backward(const Stream& stream, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, Write write, const Tensor& d_x, const Tensor& d_weight) {
  visit_float("rms_norm_backward", x.dtype(), [&]<class T>(std::type_identity<T>) {
    const BackwardArgs<Element<T>> args{
        elements<T>(d_y), elements<T>(x), elements<T>(weight),        rstd.data<float>(),
        elements<T>(d_x), nullptr,        x.dim(0) / d_weight.dim(0), static_cast<int>(x.dim(1))};
    run_backward(stream, "rms_norm_backward", args, write, d_weight);
  });
}

}  // namespace invar::ops::cuda
