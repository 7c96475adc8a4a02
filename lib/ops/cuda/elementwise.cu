#include <algorithm>

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

// parts[block] = the sum of the block's quads; a thread has a chain for each of the four columns of its quads.
template <bool kAligned, class Accumulate>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const float* x, int64_t n, Accumulate accumulate, double* parts) {
  __shared__ double scratch[kSumThreads / 32];
  double sums[4] = {};
  const int64_t quads = (n + 3) / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSumThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < quads; i += stride) {
    const Pack<float, 4> quad = load_quad<kAligned>(x, i, n);
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = accumulate(quad[k], sums[k]);
  }
  const double total = row_sum((sums[0] + sums[1]) + (sums[2] + sums[3]), scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kSumThreads) join_parts_kernel(const double* parts, int count, double* total) {
  __shared__ double scratch[kSumThreads / 32];
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kSumThreads) sum += parts[i];
  sum = row_sum(sum, scratch);
  if (threadIdx.x == 0) *total += sum;
}

template <class Accumulate>
void add_total(const Stream& stream, std::string_view op, const Tensor& x, Accumulate accumulate, const Tensor& total) {
  const int64_t n = x.numel();
  if (n == 0) return;
  const auto count = static_cast<int>(sum_parts(n));
  auto* parts = static_cast<double*>(stream.cuda().workspace(count * static_cast<int64_t>(sizeof(double))));
  const auto* from = x.data<float>();
  if (is_aligned({from})) {
    sum_parts_kernel<true><<<count, kSumThreads, 0, cuda_handle(stream)>>>(from, n, accumulate, parts);
  } else {
    sum_parts_kernel<false><<<count, kSumThreads, 0, cuda_handle(stream)>>>(from, n, accumulate, parts);
  }
  check_launch(op);
  join_parts_kernel<<<1, kSumThreads, 0, cuda_handle(stream)>>>(parts, count, total.data<double>());
  check_launch(op);
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

void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  visit_float("add", a.dtype(), [&]<class A>(std::type_identity<A>) {
    visit_float("add", b.dtype(), [&]<class B>(std::type_identity<B>) {
      visit_float("add", out.dtype(), [&]<class Out>(std::type_identity<Out>) {
        add_elements(stream, a.numel(), elements<A>(a), elements<B>(b), elements<Out>(out));
      });
    });
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

}  // namespace invar::ops::cuda
