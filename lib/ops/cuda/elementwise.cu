#include <algorithm>

#include "core/exact_sum.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

template <class... T>
inline constexpr int kCommonWidth = std::min({kVectorWidth<T>...});

template <class From, class To, int N>
struct Copy {
  using Values = Pack<From, N>;
  __device__ void read(int64_t i, Values& values) const { values = load_pack<N>(from + i * N); }
  __device__ void write(int64_t i, const Values& values) const {
    float out[N];
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = values[k];
    store_pack(to + i * N, out);
  }

  const From* from;
  To* to;
};

template <class A, class B, class Out, int N>
struct Add {
  struct Values {
    Pack<A, N> a;
    Pack<B, N> b;
  };
  __device__ void read(int64_t i, Values& values) const {
    values.a = load_pack<N>(a + i * N);
    values.b = load_pack<N>(b + i * N);
  }
  __device__ void write(int64_t i, const Values& values) const {
    float sum[N];
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = values.a[k] + values.b[k];
    store_pack(out + i * N, sum);
  }

  const A* a;
  const B* b;
  Out* out;
};

template <int N>
struct Maximum {
  struct Values {
    Pack<float, N> a;
    Pack<float, N> b;
  };
  __device__ void read(int64_t i, Values& values) const {
    values.a = load_pack<N>(a + i * N);
    values.b = load_pack<N>(b + i * N);
  }
  __device__ void write(int64_t i, const Values& values) const {
    float larger[N];
#pragma unroll
    for (int k = 0; k < N; ++k) larger[k] = fmaxf(values.a[k], values.b[k]);
    store_pack(out + i * N, larger);
  }

  const float* a;
  const float* b;
  float* out;
};

template <class T, int N>
struct ScaleBy {
  struct Values {
    Pack<T, N> x;
    float factor;
  };
  __device__ void read(int64_t i, Values& values) const {
    values.x = load_pack<N>(x + i * N);
    values.factor = load(*factor);
  }
  __device__ void write(int64_t i, const Values& values) const {
    float out[N];
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = values.x[k] * values.factor;
    store_pack(x + i * N, out);
  }

  const T* factor;
  T* x;
};

constexpr int kExactSumThreads = 256;
constexpr int kExactSumBlocks = 512;

// The digits of ExactSum::add() for one term; sums of integers have no order.
__device__ void add_digits(double term, unsigned long long* digits) {
  constexpr int kPositiveInfinity = ExactSum::kDigits - 3, kNegativeInfinity = kPositiveInfinity + 1,
                kNotANumber = kNegativeInfinity + 1;
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(term));
  const bool negative = bits >> 63 != 0;
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  unsigned long long mantissa = bits & ((1ull << 52) - 1);
  if (exponent == 0x7ff) {
    atomicAdd(&digits[mantissa != 0 ? kNotANumber : negative ? kNegativeInfinity : kPositiveInfinity], 1ull);
    return;
  }
  if (exponent != 0) mantissa |= 1ull << 52;
  const int position = exponent == 0 ? 0 : exponent - 1;
  const int first = position / 32, shift = position % 32;
  const unsigned long long low = (mantissa & 0xffff'ffffull) << shift, high = (mantissa >> 32) << shift;
  const unsigned long long parts[3] = {low & 0xffff'ffffull, (low >> 32) + (high & 0xffff'ffffull), high >> 32};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (parts[i] != 0) atomicAdd(&digits[first + i], negative ? 0ull - parts[i] : parts[i]);
  }
}

__global__ void __launch_bounds__(kExactSumThreads)
    exact_sum_kernel(const double* x, int64_t n, unsigned long long* digits) {
  __shared__ unsigned long long own[ExactSum::kDigits];
  if (threadIdx.x < ExactSum::kDigits) own[threadIdx.x] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kExactSumThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kExactSumThreads + threadIdx.x; i < n; i += step) {
    add_digits(x[i], own);
  }
  __syncthreads();
  if (threadIdx.x < ExactSum::kDigits && own[threadIdx.x] != 0) atomicAdd(&digits[threadIdx.x], own[threadIdx.x]);
}

template <class A, class B, class Out>
void add_elements(const Stream& stream, int64_t n, const A* a, const B* b, Out* out) {
  for_packs<kCommonWidth<A, B, Out>>(is_aligned({a, b, out}), n, [&](auto width, int64_t first, int64_t count) {
    const Add<A, B, Out, width()> operation{a + first, b + first, out + first};
    run_elementwise(stream, "add", count, operation);
  });
}

struct Square {
  __device__ double operator()(float x, double sum) const {
    return fma(static_cast<double>(x), static_cast<double>(x), sum);
  }
};
struct Itself {
  __device__ double operator()(float x, double sum) const { return sum + static_cast<double>(x); }
};

constexpr int kSumThreads = 256;
// Parts of a sum: their number depends on the size alone.
constexpr int64_t kMostParts = 1056;
int64_t sum_parts(int64_t n) {
  return std::min(ceil_div(n, kSumThreads * 16), kMostParts);
}

// Elements 4i to 4i + 3; zeros beyond the end, which change no sum.
template <bool kAligned>
__device__ Pack<float, 4> load_quad(const float* x, int64_t i, int64_t n) {
  if (kAligned && 4 * i + 4 <= n) return load_pack<4>(x + 4 * i);
  Pack<float, 4> quad;
#pragma unroll
  for (int k = 0; k < 4; ++k) quad.element[k] = 4 * i + k < n ? x[4 * i + k] : 0.0f;
  return quad;
}

// The block's sum of one of `parts` parts of the quads of x; a thread has a chain for each of the four columns of its
// quads. Thread 0 has the result.
template <bool kAligned, class Accumulate>
__device__ double sum_of_part(const float* x, int64_t n, int64_t part, int64_t parts, Accumulate accumulate) {
  __shared__ double scratch[kSumThreads / 32];
  double sums[4] = {};
  const int64_t quads = (n + 3) / 4;
#pragma unroll 4
  for (int64_t i = part * kSumThreads + threadIdx.x; i < quads; i += parts * kSumThreads) {
    const Pack<float, 4> quad = load_quad<kAligned>(x, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = accumulate(quad[k], sums[k]);
  }
  return row_sum((sums[0] + sums[1]) + (sums[2] + sums[3]), scratch);
}

// parts[row][part], of row blockIdx.x
template <bool kAligned, class Accumulate>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const float* x, int64_t n, Accumulate accumulate, double* parts) {
  const double total = sum_of_part<kAligned>(x + blockIdx.x * n, n, blockIdx.y, gridDim.y, accumulate);
  if (threadIdx.x == 0) parts[static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y] = total;
}

// Blocks of rows that a warp each can sum, as many as a kernel takes by value.
constexpr int64_t kShortRow = 8192;
struct ShortRows {
  static constexpr int kMost = 160;
  const float* x;
  int count;
  unsigned rows;  // in all
  int64_t begin[kMost];
  unsigned first[kMost];  // the block's first row among all
  int columns[kMost];
};

// The warp's sum of the squares of a row; a lane has a chain for each of the four columns of its quads.
template <bool kAligned>
__device__ double warp_squares(const float* row, int columns) {
  double sums[4] = {};
#pragma unroll 8
  for (int64_t i = threadIdx.x % 32; i < (columns + 3) / 4; i += 32) {
    const Pack<float, 4> quad = load_quad<kAligned>(row, i, columns);
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = Square{}(quad[k], sums[k]);
  }
  return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

__global__ void __launch_bounds__(kSumThreads)
    row_squares_kernel(const __grid_constant__ ShortRows blocks, double* out) {
  const unsigned index = blockIdx.x * (kSumThreads / 32) + threadIdx.x / 32;
  if (index >= blocks.rows) return;
  int low = 0;
  for (int high = blocks.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (blocks.first[middle] <= index ? low : high) = middle;
  }
  const int columns = blocks.columns[low];
  const float* row = blocks.x + blocks.begin[low] + static_cast<int64_t>(index - blocks.first[low]) * columns;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;  // the same for all lanes
  const double total = aligned ? warp_squares<true>(row, columns) : warp_squares<false>(row, columns);
  if (threadIdx.x % 32 == 0) out[index] = total;
}

__global__ void __launch_bounds__(kSumThreads)
    join_parts_kernel(const double* parts, int count, bool add, double* out) {
  __shared__ double scratch[kSumThreads / 32];
  parts += static_cast<int64_t>(blockIdx.x) * count;
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSumThreads) sum += parts[i];
  sum = row_sum(sum, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = add ? out[blockIdx.x] + sum : sum;
}

template <class Accumulate>
void sum_rows(const Stream& stream, std::string_view op, const float* x, int64_t rows, int64_t n, Accumulate accumulate,
              bool add, double* out) {
  if (rows == 0) return;
  const int64_t count = sum_parts(n);
  auto* parts = static_cast<double*>(stream.cuda().workspace(rows * count * int64_t{sizeof(double)}));
  const bool aligned = is_aligned({x}) && (rows == 1 || n % 4 == 0);
  const auto kernel = aligned ? sum_parts_kernel<true, Accumulate> : sum_parts_kernel<false, Accumulate>;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(count));
  kernel<<<grid, kSumThreads, 0, cuda_handle(stream)>>>(x, n, accumulate, parts);
  check_launch(op);
  join_parts_kernel<<<grid.x, kSumThreads, 0, cuda_handle(stream)>>>(parts, static_cast<int>(count), add, out);
  check_launch(op);
}

template <class Accumulate>
void add_total(const Stream& stream, std::string_view op, const Tensor& x, Accumulate accumulate, const Tensor& total) {
  if (x.empty()) return;
  sum_rows(stream, op, x.data<float>(), 1, x.numel(), accumulate, true, total.data<double>());
}

// The heads of one group lie one after another: a row is `groups` runs of `run` units.
template <class Unit>
struct HeadRuns {
  HeadRuns(const HeadView& view, int64_t unit)  // elements of one
      : first(static_cast<Unit*>(view.buffer.raw()) + view.offset / unit),
        row(view.token_stride() / unit),
        group(view.group_stride / unit) {}

  Unit* first;
  int64_t row;
  int64_t group;
};

constexpr int kHeadThreads = 256;

// A block per token.
template <class Unit>
__global__ void __launch_bounds__(kHeadThreads)
    copy_head_runs(HeadRuns<Unit> from, HeadRuns<Unit> to, int units, int run) {
  const int64_t token = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < units; i += kHeadThreads) {
    const int group = i / run;
    const int rest = i - group * run;
    to.first[token * to.row + group * to.group + rest] = from.first[token * from.row + group * from.group + rest];
  }
}

bool in_units(const HeadView& view, int64_t unit) {
  return is_aligned({view.buffer.raw()}) && view.offset % unit == 0 && view.token_stride() % unit == 0 &&
         view.group_stride % unit == 0 && view.head_dim % unit == 0;
}

template <class Unit>
void copy_heads_as(const Stream& stream, const HeadView& from, const HeadView& to, int64_t unit) {
  const auto run = static_cast<int>(from.heads_per_group * from.head_dim / unit);
  const auto blocks = static_cast<unsigned>(from.tokens());
  copy_head_runs<Unit><<<blocks, kHeadThreads, 0, cuda_handle(stream)>>>(
      HeadRuns<Unit>(from, unit), HeadRuns<Unit>(to, unit), static_cast<int>(from.groups) * run, run);
  check_launch("copy_heads");
}

}  // namespace

void zero(const Stream& stream, const Tensor& x) {
  const auto bytes = static_cast<size_t>(x.bytes());
  if (bytes > 0) check_cuda(cudaMemsetAsync(x.raw(), 0, bytes, cuda_handle(stream)), "zero");
}

void copy(const Stream& stream, const Tensor& from, const Tensor& to) {
  if (from.dtype() == to.dtype()) {
    if (from.empty() || from.raw() == to.raw()) return;
    check_cuda(cudaMemcpyAsync(to.raw(), from.raw(), static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToDevice,
                               cuda_handle(stream)),
               "copy");
    return;
  }
  const auto convert = [&]<class From, class To>(const From* source, To* target) {
    for_packs<kCommonWidth<From, To>>(is_aligned({source, target}), from.numel(),
                                      [&](auto width, int64_t first, int64_t count) {
                                        const Copy<From, To, width()> operation{source + first, target + first};
                                        run_elementwise(stream, "copy", count, operation);
                                      });
  };
  if (from.dtype() == DType::kF32) {
    convert(elements<float>(from), elements<BF16>(to));
  } else {
    convert(elements<BF16>(from), elements<float>(to));
  }
}

void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to) {
  if (from.tokens() == 0) return;
  const int64_t unit = static_cast<int64_t>(sizeof(uint4)) / size_of(from.buffer.dtype());
  if (in_units(from, unit) && in_units(to, unit)) return copy_heads_as<uint4>(stream, from, to, unit);
  if (from.buffer.dtype() == DType::kF32) return copy_heads_as<uint32_t>(stream, from, to, 1);
  copy_heads_as<uint16_t>(stream, from, to, 1);
}

void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  visit_float("add", a.dtype(), [&]<class A>(std::type_identity<A>) {
    visit_float("add", b.dtype(), [&]<class B>(std::type_identity<B>) {
      visit_float("add", out.dtype(), [&]<class Out>(std::type_identity<Out>) {
        add_elements(stream, a.numel(), elements<A>(a), elements<B>(b), elements<Out>(out));
      });
    });
  });
}

void maximum(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  const auto *from = a.data<float>(), *other = b.data<float>();
  auto* to = out.data<float>();
  for_packs<kVectorWidth<float>>(is_aligned({from, other, to}), out.numel(),
                                 [&](auto width, int64_t first, int64_t count) {
                                   const Maximum<width()> operation{from + first, other + first, to + first};
                                   run_elementwise(stream, "maximum", count, operation);
                                 });
}

void scale_by(const Stream& stream, const Tensor& factor, const Tensor& x) {
  visit_float("scale_by", x.dtype(), [&]<class S>(std::type_identity<S>) {
    using T = Element<S>;
    T* data = elements<S>(x);
    for_packs<kVectorWidth<T>>(is_aligned({data}), x.numel(), [&](auto width, int64_t first, int64_t count) {
      const ScaleBy<T, width()> operation{elements<S>(factor), data + first};
      run_elementwise(stream, "scale_by", count, operation);
    });
  });
}

void add_sum_of_squares(const Stream& stream, const Tensor& x, const Tensor& total) {
  add_total(stream, "add_sum_of_squares", x, Square{}, total);
}

void add_sum(const Stream& stream, const Tensor& x, const Tensor& total) {
  add_total(stream, "add_sum", x, Itself{}, total);
}

void row_squares(const Stream& stream, const Tensor& x, std::span<const RowBlock> blocks, const Tensor& out) {
  constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;
  ShortRows next{x.data<float>(), 0, 0, {}, {}, {}};
  auto* sums = out.data<double>();  // of the rows of `next`
  const auto flush = [&] {
    if (next.rows > 0) {
      const auto grid = static_cast<unsigned>(ceil_div(next.rows, kSumThreads / 32));
      row_squares_kernel<<<grid, kSumThreads, 0, cuda_handle(stream)>>>(next, sums);
      check_launch("row_squares");
    }
    sums += next.rows;
    next.count = 0;
    next.rows = 0;
  };
  for (const RowBlock& block : blocks) {
    const bool is_short = block.columns <= kShortRow;
    if (!is_short || next.count == ShortRows::kMost || next.rows + block.rows > kMostRows) flush();
    if (!is_short) {
      sum_rows(stream, "row_squares", next.x + block.begin, block.rows, block.columns, Square{}, false, sums);
      sums += block.rows;
      continue;
    }
    next.begin[next.count] = block.begin;
    next.first[next.count] = next.rows;
    next.columns[next.count] = static_cast<int>(block.columns);
    ++next.count;
    next.rows += static_cast<unsigned>(block.rows);
  }
  flush();
}

void exact_sum(const Stream& stream, const Tensor& x, const Tensor& digits) {
  check_cuda(cudaMemsetAsync(digits.raw(), 0, static_cast<size_t>(digits.bytes()), cuda_handle(stream)),
             "cudaMemsetAsync");
  if (x.empty()) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(kExactSumBlocks, ceil_div(x.numel(), kExactSumThreads)));
  exact_sum_kernel<<<blocks, kExactSumThreads, 0, cuda_handle(stream)>>>(
      x.data<double>(), x.numel(), reinterpret_cast<unsigned long long*>(digits.data<int64_t>()));
  check_launch("exact_sum");
}

}  // namespace invar::ops::cuda
