#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSamples = 128;  // whose places a launch takes by value

static_assert(sizeof(TermTable::Vector) == TermTable::kFields * sizeof(int64_t));

struct Call {
  const TermTable::Vector* vectors;
  const int64_t* rows;
  const float* terms;
  int64_t first_sample;
  int samples;
  SamplePlace places[kSamples];
  float* buffers[SumProgram::kMaxDepth];
};

// A thread has one element of a vector, blockIdx.y, through all samples.
__global__ void __launch_bounds__(kThreads) term_sums_kernel(const __grid_constant__ Call call) {
  const TermTable::Vector vector = call.vectors[blockIdx.y];
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= vector.width) return;
  const int64_t* rows = call.rows + vector.first + call.first_sample * vector.rows_per_sample;
  const float* terms = call.terms + element;
  for (int sample = 0; sample < call.samples; ++sample, rows += vector.rows_per_sample) {
    float sum = terms[rows[0]];
#pragma unroll 8
    for (int64_t row = 1; row < vector.rows_per_sample; ++row) sum = __fadd_rn(sum, terms[rows[row]]);
    const SamplePlace place = call.places[sample];
    float* to = call.buffers[place.buffer] + vector.into + element;
    sum = __fadd_rn(place.clears ? 0.0f : *to, sum);
    *to = sum;
    for (int join = 1; join <= place.joins; ++join) {
      float* left = call.buffers[place.buffer - join] + vector.into + element;
      sum = __fadd_rn(*left, sum);
      *left = sum;
    }
  }
}

// A run of samples whose places are a stack: the sums that they change are in registers, the top first, and are written
// once. All threads take the same steps.
template <int N, int kDepth>
struct AddTerms {
  using Sum = Pack<float, N>;
  struct Values {
    Sum stack[kDepth];
    int held;  // of the stack
    int top;   // its buffer
  };

  __device__ void read(int64_t i, Values& values) const {
    const int64_t element = begin + i * N;
    values.held = 0;
    Sum next = load_pack<N>(terms + element);
    for (int sample = 0; sample < samples; ++sample) {
      const SamplePlace place = places[sample];
      const Sum term = next;
      if (sample + 1 < samples) next = load_pack<N>(terms + (sample + 1) * n + element);  // on its way meanwhile
      if (values.held == 0 || place.buffer != values.top) {
#pragma unroll
        for (int d = kDepth - 1; d > 0; --d) values.stack[d] = values.stack[d - 1];
        ++values.held;
        values.top = place.buffer;
        values.stack[0] = place.clears ? Sum{} : load_pack<N>(buffers[place.buffer] + element);
      }
      add(term, values.stack[0]);
      for (int joins = place.joins; joins > 0; --joins) join(element, values);
    }
  }
  __device__ void write(int64_t i, const Values& values) const {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < values.held) store_pack(buffers[values.top - d] + begin + i * N, values.stack[d]);
    }
  }
  __device__ void join(int64_t element, Values& values) const {
    --values.top;
    if (values.held == 1) return add(load_pack<N>(buffers[values.top] + element), values.stack[0]);
    add(values.stack[1], values.stack[0]);
    --values.held;
#pragma unroll
    for (int d = 1; d + 1 < kDepth; ++d) values.stack[d] = values.stack[d + 1];
  }
  static __device__ void add(const Sum& term, Sum& sum) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum.element[k] = __fadd_rn(sum[k], term[k]);
  }

  const float* terms;
  int64_t n, begin;
  int samples;
  SamplePlace places[kSamples];
  float* buffers[SumProgram::kMaxDepth];
};

// The most sums that a run of samples holds.
int depth_of(std::span<const SamplePlace> places) {
  int held = 0, top = -1, most = 0;
  for (const SamplePlace& place : places) {
    if (held == 0 || place.buffer != top) ++held;
    most = std::max(most, held);
    top = place.buffer - place.joins;
    held = std::max(1, held - place.joins);
  }
  return most;
}

template <int kDepth>
void run_add_terms(const Stream& stream, const float* terms, int64_t n, std::span<const SamplePlace> places,
                   std::span<const Tensor> buffers) {
  bool aligned = n % kVectorWidth<float> == 0 && is_aligned({terms});
  for (const Tensor& buffer : buffers) aligned = aligned && is_aligned({buffer.raw()});
  for_packs<kVectorWidth<float>>(aligned, n, [&](auto width, int64_t begin, int64_t count) {
    AddTerms<width(), kDepth> operation{terms, n, begin, static_cast<int>(std::ssize(places)), {}, {}};
    std::ranges::copy(places, operation.places);
    for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
      operation.buffers[buffer] = buffers[buffer].data<float>();
    }
    run_elementwise(stream, "add_terms", count, operation);
  });
}

}  // namespace

void add_terms(const Stream& stream, const Tensor& terms, std::span<const SamplePlace> places,
               std::span<const Tensor> buffers) {
  const int64_t n = terms.numel() / terms.dim(0);
  for (int64_t first = 0; first < std::ssize(places); first += kSamples) {
    const auto rest = places.subspan(static_cast<size_t>(first));
    const auto part = rest.first(std::min(rest.size(), size_t{kSamples}));
    const auto run = [&](auto depth) {
      run_add_terms<depth()>(stream, terms.data<float>() + first * n, n, part, buffers);
    };
    const int depth = depth_of(part);
    if (depth <= 2) {
      run(std::integral_constant<int, 2>{});
    } else if (depth <= 4) {
      run(std::integral_constant<int, 4>{});
    } else {
      run(std::integral_constant<int, SumProgram::kMaxDepth>{});
    }
  }
}

void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   std::span<const SamplePlace> places, std::span<const Tensor> buffers) {
  const auto* entries = packed.data<int64_t>();
  const std::vector<TermTable::Vector>& vectors = table.vectors();
  Call call{reinterpret_cast<const TermTable::Vector*>(entries),
            entries + TermTable::kFields * std::ssize(vectors),
            terms.data<float>(),
            0,
            0,
            {},
            {}};
  for (size_t buffer = 0; buffer < buffers.size(); ++buffer) call.buffers[buffer] = buffers[buffer].data<float>();
  const dim3 grid(static_cast<unsigned>(ceil_div(table.widest(), kThreads)), static_cast<unsigned>(vectors.size()));
  while (call.first_sample < std::ssize(places)) {
    const std::span<const SamplePlace> rest = places.subspan(static_cast<size_t>(call.first_sample));
    call.samples = static_cast<int>(std::min<int64_t>(kSamples, std::ssize(rest)));
    std::copy_n(rest.begin(), call.samples, call.places);
    term_sums_kernel<<<grid, kThreads, 0, cuda_handle(stream)>>>(call);
    check_launch("add_term_sums");
    call.first_sample += call.samples;
  }
}

}  // namespace invar::ops::cuda
