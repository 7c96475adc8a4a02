#include "ops/cuda/cudnn_proof.h"

#include <algorithm>
#include <cmath>

#include "core/integer.h"
#include "ops/cuda/proof.h"
#include "ops/cuda/repeated_group.h"

namespace invar::ops::cuda {
namespace {

constexpr int64_t kBlock = 256;  // bytes that places are aligned to

GroupPlaces places_of(const CudnnSpec& spec, size_t operand) {
  const int64_t heads = spec.heads(operand) / spec.kv_heads;
  return {spec.samples,          spec.sequence_length,       spec.kv_heads,
          heads * spec.head_dim, spec.token_stride[operand], heads * spec.head_stride[operand]};
}

GroupPlaces statistics_places(const CudnnSpec& spec) {
  const int64_t group = spec.query_heads / spec.kv_heads * spec.sequence_length;
  return {spec.samples, 1, spec.kv_heads, group, spec.kv_heads * group, group};
}

uint16_t* bits(void* operand) {
  return static_cast<uint16_t*>(operand);
}
uint32_t* bits(float* statistics) {
  return reinterpret_cast<uint32_t*>(statistics);
}

// Gives the operands of a proof their places from `memory` on, and returns the bytes of all; null only counts.
struct Places {
  Places(const CudnnSpec& spec, const CudnnSpec& one, const CudnnPointers& given, std::byte* memory)
      : copies(given), next(memory) {
    counter = static_cast<uint64_t*>(take(sizeof(uint64_t)));
    alone.statistics = static_cast<float*>(take(one.statistics() * size_of(DType::kF32)));
    for (size_t operand = 0; operand < spec.operands(); ++operand) {
      alone.operands[operand] = take(one.bytes(operand));
      if (!spec.is_output(operand)) copies.operands[operand] = take(spec.bytes(operand));
    }
  }

  void* take(int64_t size) {
    void* const place = next;
    const int64_t whole = round_up(size, kBlock);
    if (next != nullptr) next += whole;
    bytes += whole;
    return place;
  }

  uint64_t* counter;
  CudnnPointers alone, copies;
  std::byte* next;
  int64_t bytes = 0;
};

}  // namespace

int64_t CudnnProofs::workspace_bytes(const CudnnSpec& spec) {
  const ProofClock clock(stream_);  // plans are built
  int64_t bytes = std::max(plans_.workspace_bytes(spec), plans_.workspace_bytes(one_group_of(spec, false)));
  if (spec.backward) bytes = std::max(bytes, plans_.workspace_bytes(one_group_of(spec, true)));
  return bytes;
}

void CudnnProofs::prove(const CudnnSpec& spec, const CudnnPointers& given, void* workspace) {
  const CudnnSpec one = one_group_of(spec, spec.backward);
  const Proof proof(stream_, Places(spec, one, given, nullptr).bytes,
                    format("cuDNN's attention of {} has the bits of each KV group alone", spec.describe()));
  const Places places(spec, one, given, proof.memory());

  fill(one, places.alone);
  plans_.execute(one_group_of(spec, false), places.alone, workspace);
  if (spec.backward) plans_.execute(one, places.alone, workspace);

  for (size_t operand = 0; operand < spec.operands(); ++operand) {
    if (spec.is_output(operand)) continue;
    repeat_group(stream_, bits(places.alone.operands[operand]), places_of(spec, operand),
                 bits(places.copies.operands[operand]));
  }
  if (spec.backward) {
    repeat_group(stream_, bits(places.alone.statistics), statistics_places(spec), bits(places.copies.statistics));
  }
  plans_.execute(spec, places.copies, workspace);

  const int64_t unlike = count_unlike_outputs(stream_, spec, places.alone, places.copies, places.counter);
  if (unlike > 0) {
    throw Error(ErrorKind::kFault,
                format("cudnn attention of {}: {} elements have not the bits that their KV group has alone, so they "
                       "would depend on the layout",
                       spec.describe(), unlike),
                "another train.micro_batch_size or tensor degree gets another plan; a build without cuDNN (cmake "
                "-DCUDNN_LIBRARY=OFF) has invar's own kernel for attention");
  }
  proved_.insert(spec);
  ++stream_.attachment<ProofRecord>().attention_plans;
}

// Scores of a query spread by about two, so that many keys count and the largest comes up anywhere.
void CudnnProofs::fill(const CudnnSpec& one, const CudnnPointers& alone) const {
  const double score = std::log2(static_cast<double>(one.scale) * std::sqrt(static_cast<double>(one.head_dim)));
  const int of_keys = static_cast<int>(std::clamp(-std::round(score) - 1, -60.0, 60.0));
  for (size_t operand = 0; operand < one.operands(); ++operand) {
    if (one.is_output(operand) || operand == kOut) continue;
    fill_group(stream_, static_cast<BF16*>(alone.operands[operand]), places_of(one, operand).count(), operand + 1,
               operand == kK ? of_keys : 0);
  }
}

int64_t count_unlike_outputs(CudaStream& stream, const CudnnSpec& spec, const CudnnPointers& alone,
                             const CudnnPointers& all, uint64_t* counter) {
  check_cuda(cudaMemsetAsync(counter, 0, sizeof *counter, stream.handle()), "cudaMemsetAsync");
  for (size_t operand = 0; operand < spec.operands(); ++operand) {
    if (!spec.is_output(operand)) continue;
    count_unlike(stream, bits(alone.operands[operand]), places_of(spec, operand), bits(all.operands[operand]), counter);
  }
  if (!spec.backward) {
    count_unlike(stream, bits(alone.statistics), statistics_places(spec), bits(all.statistics), counter);
  }
  uint64_t count = 0;
  check_cuda(cudaMemcpyAsync(&count, counter, sizeof count, cudaMemcpyDeviceToHost, stream.handle()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream.handle()), "attention comparison");
  return static_cast<int64_t>(count);
}

}  // namespace invar::ops::cuda
