#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
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

}  // namespace

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
