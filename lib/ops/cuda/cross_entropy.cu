#include "ops/cross_entropy.h"

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

// Each pass over the logits is one read at the speed of memory: a block has a row, a thread four 16-byte loads in
// flight. expf is CUDA's, within 2 ulp (2.4e-7).
namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPacks = 4;  // that a thread loads together
constexpr int kSmallThreads = 256;

// The columns of a chunk of logits that are tokens, not padding.
struct Columns {
  Columns(const Tensor& logits, Range columns, Range vocabulary, int64_t vocabulary_size)
      : width(static_cast<uint32_t>(logits.dim(1))),
        begin(static_cast<uint32_t>(columns.begin)),
        first(vocabulary.begin + columns.begin),
        count(static_cast<uint32_t>(intersect({first, first + columns.size()}, {0, vocabulary_size}).size())) {}

  // The label's column, counted from the first of these; -1 where it is masked or elsewhere.
  __device__ int64_t of(int32_t label) const {
    const int64_t column = label - first;
    return label >= 0 && column >= 0 && column < count ? column : -1;
  }

  uint32_t width;  // of a row
  uint32_t begin;  // in a row
  int64_t first;   // token of the first
  uint32_t count;
};

// body(i, pack) for pack i of a thread's packs [0, packs), kPacks of them loaded before the first body runs. A body
// may overwrite its pack.
template <int N, class Body>
__device__ void for_packs(const float* row, uint32_t packs, const Body& body) {
  Pack<float, N> loaded[kPacks];
  uint32_t at = threadIdx.x;
  for (; at + (kPacks - 1) * kThreads < packs; at += kPacks * kThreads) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) loaded[i] = load_pack<N>(row + int64_t{at + i * kThreads} * N);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) body(at + i * kThreads, loaded[i]);
  }
  for (; at < packs; at += kThreads) body(at, load_pack<N>(row + int64_t{at} * N));
}

// Maximum of some logits and Σ exp(logit − maximum), each operation rounded by itself. A NaN is passed over by the
// maximum and makes the sum NaN.
struct Statistics {
  template <int N>
  __device__ void add(const float (&x)[N]) {
    float peak = x[0];
#pragma unroll
    for (int i = 1; i < N; ++i) peak = fmaxf(peak, x[i]);
    if (peak > maximum) {
      sum = __fmul_rn(sum, expf(maximum - peak));
      maximum = peak;
    }
    const float origin = maximum == -INFINITY ? 0.0f : maximum;  // −inf − −inf is no number
    float terms = expf(x[0] - origin);
#pragma unroll
    for (int i = 1; i < N; ++i) terms = __fadd_rn(terms, expf(x[i] - origin));
    sum = __fadd_rn(sum, terms);
  }

  float maximum = -INFINITY;
  float sum = 0.0f;
};

// Over the block, in a fixed order; for thread 0. Sums are joined in fp64.
__device__ Statistics block_statistics(Statistics own) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float peaks[kWarps];
  __shared__ double sums[kWarps];
  float peak = own.maximum;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
  if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) peak = fmaxf(peak, peaks[warp]);
  // Without a maximum the sum is 0, or NaN, which shall be seen.
  const float factor = own.maximum == -INFINITY ? 1.0f : expf(own.maximum - peak);
  const double sum = lane_sum(static_cast<double>(own.sum) * static_cast<double>(factor));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  return {peak, static_cast<float>(total)};
}

template <int N>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(Columns columns, const float* __restrict__ logits, const int32_t* labels, float* maximum,
                      float* sum, float* target) {
  const int64_t t = blockIdx.x;
  const float* row = logits + t * columns.width + columns.begin;
  Statistics own;
  for_packs<N>(row, (columns.count + N - 1) / N, [&](uint32_t at, const Pack<float, N>& pack) {
    float x[N];
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = at * N + i < columns.count ? pack[i] : -INFINITY;
    own.add(x);
  });
  const Statistics all = block_statistics(own);
  if (threadIdx.x != 0) return;
  maximum[t] = all.maximum;
  sum[t] = all.sum;
  const int64_t column = columns.of(labels[t]);
  target[t] = column < 0 ? 0.0f : row[column];
}

struct Gradient {
  float scale;
  float cap;          // 0: none
  float inverse_cap;  // 0 without one

  __device__ float operator()(float logit, float peak, float inverse_sum, bool hit) const {
    const float share = cap > 0.0f ? logit * inverse_cap : 0.0f;  // a logit of −inf too
    const float slope = fmaf(-share, share, 1.0f) * scale;
    return fmaf(expf(logit - peak), inverse_sum, hit ? -1.0f : 0.0f) * slope;
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(Columns columns, Gradient gradient, const float* logits, const int32_t* labels,
                    const float* maximum, const float* sum, T* d_logits) {
  const int64_t t = blockIdx.x;
  T* d_row = d_logits + t * columns.width;
  const int32_t label = labels[t];
  const int64_t column = columns.of(label);
  const uint32_t count = label < 0 ? 0 : columns.count;
  const uint32_t packs = (count + N - 1) / N;
  const float peak = maximum[t];
  const float inverse_sum = 1.0f / sum[t];
  for_packs<N>(logits + t * columns.width, packs, [&](uint32_t at, const Pack<float, N>& pack) {
    float d[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t c = at * N + i;
      d[i] = c < count ? gradient(pack[i], peak, inverse_sum, c == column) : 0.0f;
    }
    store_pack(d_row + int64_t{at} * N, d);
  });
  const float zeros[N] = {};
  for (uint32_t at = packs + threadIdx.x; at < columns.width / N; at += kThreads) {
    store_pack(d_row + int64_t{at} * N, zeros);
  }
}

// x / cap, not x · (1/cap): as Hugging Face rounds it.
__device__ float capped(float x, float cap) {
  return cap * tanhf(x / cap);
}

template <int N>
__global__ void __launch_bounds__(kSmallThreads) softcap_kernel(float cap, float* x, int64_t size) {
  const int64_t packs = size / N;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPacks * kSmallThreads + threadIdx.x;
  Pack<float, N> loaded[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t at = first + i * kSmallThreads;
    if (at < packs) loaded[i] = load_pack<N>(x + at * N);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t at = first + i * kSmallThreads;
    if (at >= packs) continue;
    float y[N];
#pragma unroll
    for (int k = 0; k < N; ++k) y[k] = capped(loaded[i][k], cap);
    store_pack(x + at * N, y);
  }
  const int64_t rest = packs * N + first;
  if (blockIdx.x == 0 && rest < size) x[rest] = capped(x[rest], cap);
}

__global__ void rescale_kernel(const float* own_maximum, const float* maximum, float* sum, int64_t n) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const double factor = exp(static_cast<double>(own_maximum[t]) - static_cast<double>(maximum[t]));
  sum[t] = sum[t] == 0.0f ? 0.0f : static_cast<float>(static_cast<double>(sum[t]) * factor);
}

// fp64, so that two large logits cancel without loss.
__global__ void losses_kernel(const int32_t* labels, const float* maximum, const float* sum, const float* target,
                              float* losses, int64_t n) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= n) return;
  const double log_sum = log(static_cast<double>(sum[t])) + static_cast<double>(maximum[t]);
  losses[t] = labels[t] < 0 ? 0.0f : static_cast<float>(log_sum - static_cast<double>(target[t]));
}

unsigned small_blocks(int64_t n) {
  return static_cast<unsigned>(ceil_div(n, kSmallThreads));
}

template <int N>
void launch_softcap(const Stream& stream, float cap, const Tensor& logits) {
  const int64_t size = logits.numel();
  const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(size, N), kPacks * kSmallThreads));
  softcap_kernel<N><<<blocks, kSmallThreads, 0, cuda_handle(stream)>>>(cap, logits.data<float>(), size);
}

// Whether columns are read in packs, which the order of a sum depends on: their number alone decides. Error{kFault} if
// packs of the logits, or those of `other`, then do not lie at multiples of their size.
bool reads_packs(std::string_view op, const Tensor& logits, Range columns, const Tensor& other) {
  constexpr int64_t kPack = kVectorWidth<float>;
  if (columns.size() % kPack != 0) return false;
  INVAR_CHECK(columns.begin % kPack == 0 && logits.dim(1) % kPack == 0,
              "{}: columns [{}, {}) of {} are not aligned to 16 bytes", op, columns.begin, columns.end,
              logits.describe());
  expect_aligned(op, {logits.raw()});
  expect_aligned(op, {other.raw()}, kPack * size_of(other.dtype()));
  return true;
}

}  // namespace

void softcap(const Stream& stream, float cap, const Tensor& logits) {
  if (logits.empty()) return;
  if (is_aligned({logits.raw()})) {
    launch_softcap<kVectorWidth<float>>(stream, cap, logits);
  } else {
    launch_softcap<1>(stream, cap, logits);
  }
  check_launch("softcap");
}

void logits_statistics(const Stream& stream, const Tensor& logits, Range columns, const Tensor& labels,
                       Range vocabulary, int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum,
                       const Tensor& target) {
  if (labels.empty()) return;
  constexpr auto kOp = "logits_statistics";
  const auto kernel =
      reads_packs(kOp, logits, columns, logits) ? statistics_kernel<kVectorWidth<float>> : statistics_kernel<1>;
  kernel<<<static_cast<unsigned>(labels.numel()), kThreads, 0, cuda_handle(stream)>>>(
      Columns(logits, columns, vocabulary, vocabulary_size), logits.data<float>(), labels.data<int32_t>(),
      maximum.data<float>(), sum.data<float>(), target.data<float>());
  check_launch(kOp);
}

void rescale_sum_exp(const Stream& stream, const Tensor& own_maximum, const Tensor& maximum, const Tensor& sum) {
  if (sum.empty()) return;
  rescale_kernel<<<small_blocks(sum.numel()), kSmallThreads, 0, cuda_handle(stream)>>>(
      own_maximum.data<float>(), maximum.data<float>(), sum.data<float>(), sum.numel());
  check_launch("rescale_sum_exp");
}

void token_losses(const Stream& stream, const Tensor& labels, const Tensor& maximum, const Tensor& sum,
                  const Tensor& target, const Tensor& losses) {
  if (losses.empty()) return;
  losses_kernel<<<small_blocks(losses.numel()), kSmallThreads, 0, cuda_handle(stream)>>>(
      labels.data<int32_t>(), maximum.data<float>(), sum.data<float>(), target.data<float>(), losses.data<float>(),
      losses.numel());
  check_launch("token_losses");
}

void logits_gradient(const Stream& stream, const Tensor& logits, const Tensor& labels, Range vocabulary,
                     int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum, float scale, float cap,
                     const Tensor& d_logits) {
  if (d_logits.empty()) return;
  const Gradient gradient{scale, cap, cap > 0 ? 1.0f / cap : 0.0f};
  constexpr auto kOp = "logits_gradient";
  const Range all{0, logits.dim(1)};
  visit_float(kOp, d_logits.dtype(), [&]<class T>(std::type_identity<T>) {
    const auto kernel = reads_packs(kOp, logits, all, d_logits) ? gradient_kernel<Element<T>, kVectorWidth<float>>
                                                                : gradient_kernel<Element<T>, 1>;
    kernel<<<static_cast<unsigned>(labels.numel()), kThreads, 0, cuda_handle(stream)>>>(
        Columns(logits, all, vocabulary, vocabulary_size), gradient, logits.data<float>(), labels.data<int32_t>(),
        maximum.data<float>(), sum.data<float>(), elements<T>(d_logits));
  });
  check_launch(kOp);
}

}  // namespace invar::ops::cuda
