#pragma once

#include <algorithm>

#include "device/cuda/cuda_stream.h"
#include "ops/attention.h"
#include "ops/cuda/device_math.cuh"

// What the attention kernels of this backend share: which query sees which key, how a call is cut into blocks, delta.
// A block serves one tile of one head of one sample, so its sums know nothing of other heads and samples.
namespace invar::ops::cuda {

// A HeadView on the device.
template <class T>
struct DeviceHeads {
  T* first;  // element 0 of head 0 of token 0
  int64_t token_stride;
  int64_t group_stride;
  int heads_per_group;
  int head_dim;
  int head_stride;  // elements from one head of a group to the next

  DeviceHeads() = default;
  explicit DeviceHeads(const HeadView& view)
      : first(static_cast<T*>(view.buffer.raw()) + view.offset),
        token_stride(view.token_stride()),
        group_stride(view.group_stride),
        heads_per_group(static_cast<int>(view.heads_per_group)),
        head_dim(static_cast<int>(view.head_dim)),
        head_stride(static_cast<int>(view.head_dim)) {}

  __device__ T* at(int64_t token, int head) const {
    return first + token * token_stride + head / heads_per_group * group_stride +
           static_cast<int64_t>(head % heads_per_group) * head_stride;
  }
  // Of keys or values: the group's head for each of its query heads.
  DeviceHeads for_query_heads(int count) const {
    DeviceHeads heads = *this;
    heads.heads_per_group = count;
    heads.head_stride = 0;
    return heads;
  }
};

// The sizes of a call. Queries and keys are counted from the start of their sample.
struct AttentionSizes {
  int sequence;
  int samples;
  int groups;
  int heads_per_group;
  int head_dim;
  int window;  // never 0, at most the sequence
  float scale;
  const int32_t* document_starts;  // (T), or null

  AttentionSizes(const AttentionParams& params, const HeadView& q)
      : sequence(static_cast<int>(params.sequence_length)),
        samples(static_cast<int>(q.tokens() / params.sequence_length)),
        groups(static_cast<int>(q.groups)),
        heads_per_group(static_cast<int>(q.heads_per_group)),
        head_dim(static_cast<int>(q.head_dim)),
        window(static_cast<int>(params.window == 0 ? params.sequence_length
                                                   : std::min(params.window, params.sequence_length))),
        scale(params.scale),
        document_starts(params.document_starts.defined() ? params.document_starts.data<int32_t>() : nullptr) {
    INVAR_CHECK(params.sequence_length < (1 << 30) && q.tokens() < (int64_t{1} << 31),
                "attention over {} tokens in samples of {}", q.tokens(), params.sequence_length);
  }

  __host__ __device__ int heads() const { return groups * heads_per_group; }
  __device__ int64_t token(int sample, int position) const {
    return static_cast<int64_t>(sample) * sequence + position;
  }

  // The first key of a query's document.
  __device__ int document_start(int sample, int query) const {
    return document_starts == nullptr ? 0 : document_starts[token(sample, query)];
  }
  __device__ bool visible(int query, int key, int document_start) const {
    return key <= query && query - key < window && key >= document_start;
  }
  // No query from this one on sees an earlier key.
  __device__ int first_key(int sample, int query) const {
    return max(max(0, query - window + 1), document_start(sample, query));
  }
  // No query from the returned one on sees this key or an earlier one.
  __device__ int end_of_queries(int sample, int key) const {
    int end = min(sequence, key + window);
    if (document_starts == nullptr) return end;
    int begin = key;  // it sees itself
    while (begin + 1 < end) {
      const int middle = begin + (end - begin) / 2;
      (document_start(sample, middle) <= key ? begin : end) = middle;
    }
    return end;
  }
};

// The tile that a block of a grid of tiles · samples · heads serves: heads first, the tiles with the most work first.
struct BlockPlace {
  int head;
  int sample;
  int tile;

  __device__ BlockPlace(const AttentionSizes& sizes, int heads) {
    head = static_cast<int>(blockIdx.x) % heads;
    const int rest = static_cast<int>(blockIdx.x) / heads;
    sample = rest % sizes.samples;
    tile = rest / sizes.samples;
  }
};

inline unsigned attention_blocks(const AttentionSizes& sizes, int heads, int tile_rows) {
  const int64_t tiles = (sizes.sequence + tile_rows - 1) / tile_rows;
  const int64_t blocks = tiles * sizes.samples * heads;
  INVAR_CHECK(blocks < (int64_t{1} << 31), "attention: {} tiles in one call", blocks);
  return static_cast<unsigned>(blocks);
}

// delta (T, Hq) = rowsum(d_out ∘ out), which is rowsum(P ∘ dP); a warp per row. kWidth elements of a head are one
// aligned access.
template <class T, int kWidth>
__global__ void attention_delta(DeviceHeads<const T> out, DeviceHeads<const T> d_out, int64_t tokens, int heads,
                                float* delta) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= tokens * heads) return;
  const T* a = out.at(row / heads, static_cast<int>(row % heads));
  const T* b = d_out.at(row / heads, static_cast<int>(row % heads));
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x % 32) * kWidth; d < out.head_dim; d += 32 * kWidth) {
    const auto x = load_pack<kWidth>(a + d);
    const auto y = load_pack<kWidth>(b + d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += x[i] * y[i];
  }
  sum = lane_sum(sum);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

template <class T, int kWidth>
void fill_attention_delta(const Stream& stream, const HeadView& out, const HeadView& d_out, float* delta) {
  constexpr unsigned kThreads = 256;
  const int64_t rows = out.tokens() * out.heads();
  attention_delta<T, kWidth>
      <<<static_cast<unsigned>((rows * 32 + kThreads - 1) / kThreads), kThreads, 0, cuda_handle(stream)>>>(
          DeviceHeads<const T>(out), DeviceHeads<const T>(d_out), out.tokens(), static_cast<int>(out.heads()), delta);
  check_launch("attention_delta");
}

}  // namespace invar::ops::cuda
