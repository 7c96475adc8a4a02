#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/sum_stack.cuh"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;

static_assert(sizeof(TermTable::Vector) == TermTable::kFields * sizeof(int64_t));

struct Call {
  const TermTable::Vector* vectors;
  const int64_t* rows;
  const float* terms;
  PackedSums sums;
};
static_assert(sizeof(Call) <= kParameterBytes);

// A thread has one element of a vector, blockIdx.y, through all samples.
template <int kDepth>
__global__ void __launch_bounds__(kThreads) term_sums_kernel(const __grid_constant__ Call call) {
  const TermTable::Vector vector = call.vectors[blockIdx.y];
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= vector.width) return;
  const auto buffers = [&](int buffer) { return call.sums.buffers[buffer] + vector.into + element; };
  const int64_t* rows = call.rows + vector.first;
  const float* terms = call.terms + element;
  SumStack<1, kDepth> stack;
  for (int sample = 0; sample < call.sums.samples; ++sample) {
    float sum = terms[rows[0]];
#pragma unroll 8
    for (int64_t row = 1; row < vector.rows_per_sample; ++row) sum = __fadd_rn(sum, terms[rows[row]]);
    stack.begin(call.sums.places[sample], buffers);
    stack.add_to(stack.top(), {{sum}});
    stack.finish(call.sums.places[sample], buffers);
    rows += vector.rows_per_sample;
  }
  stack.store(buffers);
}

template <int N, int kDepth>
struct AddTerms {
  using Values = SumStack<N, kDepth>;
  static constexpr int kBatch = 4;  // terms that are read before the first of them is added

  __device__ void read(int64_t i, Values& stack) const {
    const int64_t element = begin + i * N;
    for (int begun = 0; begun < sums.samples; begun += kBatch) {
      Pack<float, N> batch[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begun + b < sums.samples) batch[b] = load_pack<N>(terms + (begun + b) * n + element);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begun + b >= sums.samples) continue;
        const PackedSums::Place place = sums.places[begun + b];
        stack.begin(place, at(i));
        stack.add_to(stack.top(), batch[b]);
        stack.finish(place, at(i));
      }
    }
  }
  __device__ void write(int64_t i, const Values& stack) const {
    stack.store(at(i));
  }
  __device__ auto at(int64_t i) const {
    return [this, i](int buffer) { return sums.buffers[buffer] + begin + i * N; };
  }

  const float* terms;
  int64_t n, begin;
  PackedSums sums;
};
static_assert(sizeof(AddTerms<1, 1>) + sizeof(int64_t) <= kParameterBytes);  // and the count of packs

}  // namespace

void add_terms(const Stream& stream, const Tensor& terms, const SampleSums& sums) {
  const int64_t n = terms.numel() / terms.dim(0);
  bool aligned = n % kVectorWidth<float> == 0 && is_aligned({terms.raw()});
  for (const Tensor& buffer : sums.buffers) aligned = aligned && is_aligned({buffer.raw()});
  const PackedSums packed(sums.places, sums.buffers);
  with_depth(sums.places, [&](auto depth) {
    for_packs<kVectorWidth<float>>(aligned, n, [&](auto width, int64_t begin, int64_t count) {
      run_elementwise(stream, "add_terms", count, AddTerms<width(), depth()>{terms.data<float>(), n, begin, packed});
    });
  });
}

void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   const SampleSums& sums) {
  const auto* entries = packed.data<int64_t>();
  const int64_t vectors = std::ssize(table.vectors());
  const Call call{reinterpret_cast<const TermTable::Vector*>(entries),
                  entries + TermTable::kFields * vectors,
                  terms.data<float>(),
                  {sums.places, sums.buffers}};
  const dim3 grid(static_cast<unsigned>(ceil_div(table.widest(), kThreads)), static_cast<unsigned>(vectors));
  with_depth(sums.places,
             [&](auto depth) { term_sums_kernel<depth()><<<grid, kThreads, 0, cuda_handle(stream)>>>(call); });
  check_launch("add_term_sums");
}

}  // namespace invar::ops::cuda
