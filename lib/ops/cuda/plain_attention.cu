#include <limits>
#include <type_traits>

#include "ops/attention_check.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/attention_device.cuh"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

constexpr int kTile = 64;          // queries, keys, and columns of a chunk of head_dim
constexpr int kPitch = kTile + 4;  // floats of a row in shared memory
constexpr int kDepth = kTile / 2;  // columns of q and k at a time: the two share a chunk
constexpr int kThreads = 256;      // 16 × 16, each with 4 × 4 elements of a tile
constexpr int kSlice = 256;        // output columns of a block; a larger head_dim takes more blocks

// Rows of one head; the ones from `count` on, and columns from `columns` on, count as zeros.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int count;
  int columns;

  __device__ float at(int row, int column) const {
    return row < count && column < columns ? load(first[row * stride + column]) : 0.0f;
  }
};

template <class T>
__device__ Rows<T> rows_of(const DeviceHeads<const T>& heads, int64_t token, int head, int count) {
  return {heads.at(token, head), heads.token_stride, min(count, kTile), heads.head_dim};
}

struct alignas(16) SharedTile {
  float row[kTile][kPitch];
};

// Of a thread: the first of its 4 rows and of its 4 columns of a tile.
__device__ int own_row() {
  return static_cast<int>(threadIdx.x) / 16 * 4;
}
__device__ int own_column() {
  return static_cast<int>(threadIdx.x) % 16 * 4;
}

// sum[i][j] += left[r][own row + i] · right[r][own column + j], r ascending.
__device__ void add_outer_products(const float (*left)[kPitch], const float (*right)[kPitch], int depth,
                                   float (&sum)[4][4]) {
#pragma unroll 8
  for (int r = 0; r < depth; ++r) {
    const float4 a = *reinterpret_cast<const float4*>(&left[r][own_row()]);
    const float4 b = *reinterpret_cast<const float4*>(&right[r][own_column()]);
    const float x[4] = {a.x, a.y, a.z, a.w};
    const float y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
    }
  }
}

// products[i][j] = a's row (own row + i) · b's row (own column + j).
template <class T>
__device__ void multiply_rows(const Rows<T>& a, const Rows<T>& b, SharedTile& chunk, float (&products)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) products[i][j] = 0.0f;
  }
  for (int first = 0; first < a.columns; first += kDepth) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
      const int row = i / kDepth;
      const int column = i % kDepth;
      chunk.row[column][row] = a.at(row, first + column);
      chunk.row[kDepth + column][row] = b.at(row, first + column);
    }
    __syncthreads();
    add_outer_products(chunk.row, chunk.row + kDepth, kDepth, products);
  }
}

// The sums of a thread: its 4 rows, and 4 columns of each chunk of the slice.
template <int kChunks>
struct SliceSums {
  float chunk[kChunks][4][4] = {};

  // Adds, for r ascending, weights[r][own row] · rows[r], columns [slice, slice + kSlice). All threads wrote weights.
  template <class T>
  __device__ void add(const SharedTile& weights, const Rows<T>& rows, int slice, SharedTile& shared) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int first = slice + c * kTile;
      if (first >= rows.columns) continue;
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile; i += kThreads) {
        shared.row[i / kTile][i % kTile] = rows.at(i / kTile, first + i % kTile);
      }
      __syncthreads();
      add_outer_products(weights.row, shared.row, kTile, chunk[c]);
    }
  }

  // Rows beyond `count` are not stored; factor(i) is that of row own row + i.
  template <class T, class Factor>
  __device__ void store_rows(const DeviceHeads<T>& heads, int64_t token, int head, int count, int slice,
                             Factor factor) const {
    for (int i = 0; i < 4 && own_row() + i < count; ++i) {
      T* row = heads.at(token + own_row() + i, head);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = slice + c * kTile + own_column() + j;
          if (column < heads.head_dim) store(row[column], factor(i) * chunk[c][i][j]);
        }
      }
    }
  }
};

// The softmax of a thread's 4 rows so far; the 16 threads of a row hold the same.
struct RowSoftmax {
  float largest[4];
  float sum[4];

  // A finite start: in a tile where a query sees nothing, exp(start − start) is 1.
  __device__ RowSoftmax() {
    for (int i = 0; i < 4; ++i) {
      largest[i] = -std::numeric_limits<float>::max();
      sum[i] = 0.0f;
    }
  }

  // Turns scores into exp(score − largest so far); returns by what the earlier sums of row i shrink.
  __device__ float update(int i, float (&scores)[4]) {
    float tile_largest = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    for (int offset = 8; offset > 0; offset /= 2) {
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(0xffffffffu, tile_largest, offset));
    }
    const float before = largest[i];
    largest[i] = fmaxf(before, tile_largest);
    const float correction = expf(before - largest[i]);
    float tile_sum = 0.0f;
    for (int j = 0; j < 4; ++j) {
      scores[j] = expf(scores[j] - largest[i]);
      tile_sum += scores[j];
    }
    sum[i] = sum[i] * correction + lane_sum<16>(tile_sum);
    return correction;
  }
};

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads)
    plain_forward(AttentionSizes sizes, DeviceHeads<const T> q, DeviceHeads<const T> k, DeviceHeads<const T> v,
                  DeviceHeads<T> out, float* lse) {
  __shared__ SharedTile chunk, weights;
  const BlockPlace place(sizes, sizes.heads());
  const int sample = place.sample;
  const int group = place.head / sizes.heads_per_group;
  const int first_query = ((sizes.sequence - 1) / kTile - place.tile) * kTile;
  const int queries = min(kTile, sizes.sequence - first_query);
  const int slice = static_cast<int>(blockIdx.y) * kSlice;
  const Rows<T> q_rows = rows_of(q, sizes.token(sample, first_query), place.head, queries);

  SliceSums<kChunks> sums;
  RowSoftmax softmax;
  const int first_key = sizes.first_key(sample, first_query) / kTile * kTile;
  for (int key_tile = first_key; key_tile < first_query + queries; key_tile += kTile) {
    const int64_t token = sizes.token(sample, key_tile);
    const int keys = sizes.sequence - key_tile;
    float scores[4][4];
    multiply_rows(q_rows, rows_of(k, token, group, keys), chunk, scores);
    for (int i = 0; i < 4; ++i) {
      const int query = min(first_query + own_row() + i, sizes.sequence - 1);
      const int start = sizes.document_start(sample, query);
      for (int j = 0; j < 4; ++j) {
        const bool visible = sizes.visible(query, key_tile + own_column() + j, start);
        scores[i][j] = visible ? sizes.scale * scores[i][j] : -INFINITY;
      }
      const float correction = softmax.update(i, scores[i]);
      for (int c = 0; c < kChunks; ++c) {
        for (int j = 0; j < 4; ++j) sums.chunk[c][i][j] *= correction;
      }
      for (int j = 0; j < 4; ++j) weights.row[own_column() + j][own_row() + i] = scores[i][j];
    }
    sums.add(weights, rows_of(v, token, group, keys), slice, chunk);
  }

  const int64_t token = sizes.token(sample, first_query);
  sums.store_rows(out, token, place.head, queries, slice, [&](int i) { return 1.0f / softmax.sum[i]; });
  if (slice > 0 || own_column() > 0) return;
  for (int i = 0; i < 4 && own_row() + i < queries; ++i) {
    lse[(token + own_row() + i) * sizes.heads() + place.head] = softmax.largest[i] + logf(softmax.sum[i]);
  }
}

// The operands of backward.
template <class T>
struct BackwardOperands {
  DeviceHeads<const T> q, k, v, d_out;
  const float* lse;
  const float* delta;
};

// p = exp(s − lse) and d_scores = p ∘ (dO·Vᵀ − delta) of a thread's 4 queries and 4 keys of a pair of tiles.
template <class T>
__device__ void recompute(const AttentionSizes& sizes, const BackwardOperands<T>& operands, int sample, int head,
                          int query_tile, int key_tile, SharedTile& chunk, float (&p)[4][4], float (&d_scores)[4][4]) {
  const int group = head / sizes.heads_per_group;
  const int64_t query_token = sizes.token(sample, query_tile);
  const int64_t key_token = sizes.token(sample, key_tile);
  const int queries = sizes.sequence - query_tile;
  const int keys = sizes.sequence - key_tile;
  multiply_rows(rows_of(operands.q, query_token, head, queries), rows_of(operands.k, key_token, group, keys), chunk, p);
  multiply_rows(rows_of(operands.d_out, query_token, head, queries), rows_of(operands.v, key_token, group, keys), chunk,
                d_scores);
  for (int i = 0; i < 4; ++i) {
    const int query = query_tile + own_row() + i;
    const bool exists = query < sizes.sequence;
    const int64_t row = (query_token + own_row() + i) * sizes.heads() + head;
    const int start = exists ? sizes.document_start(sample, query) : 0;
    const float lse = exists ? operands.lse[row] : 0.0f;
    const float delta = exists ? operands.delta[row] : 0.0f;
    for (int j = 0; j < 4; ++j) {
      const bool visible = exists && sizes.visible(query, key_tile + own_column() + j, start);
      p[i][j] = visible ? expf(sizes.scale * p[i][j] - lse) : 0.0f;
      d_scores[i][j] = visible ? p[i][j] * (d_scores[i][j] - delta) : 0.0f;
    }
  }
}

// Query heads of the group ascending, queries ascending.
template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads)
    plain_backward_keys(AttentionSizes sizes, BackwardOperands<T> operands, DeviceHeads<T> d_k, DeviceHeads<T> d_v) {
  __shared__ SharedTile chunk, weights;
  const BlockPlace place(sizes, sizes.groups);
  const int sample = place.sample;
  const int group = place.head;
  const int key_tile = place.tile * kTile;
  const int keys = min(kTile, sizes.sequence - key_tile);
  const int slice = static_cast<int>(blockIdx.y) * kSlice;
  const int end_of_queries = sizes.end_of_queries(sample, key_tile + keys - 1);
  // Weights as (queries, keys): the rows of the sums are keys.
  const auto share = [&](const float(&tile)[4][4]) {
    __syncthreads();
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) weights.row[own_row() + i][own_column() + j] = tile[i][j];
    }
  };

  SliceSums<kChunks> k_sums, v_sums;
  for (int head = group * sizes.heads_per_group; head < (group + 1) * sizes.heads_per_group; ++head) {
    for (int query_tile = key_tile; query_tile < end_of_queries; query_tile += kTile) {
      const int64_t token = sizes.token(sample, query_tile);
      const int queries = sizes.sequence - query_tile;
      float p[4][4], d_scores[4][4];
      recompute(sizes, operands, sample, head, query_tile, key_tile, chunk, p, d_scores);
      share(p);
      v_sums.add(weights, rows_of(operands.d_out, token, head, queries), slice, chunk);
      share(d_scores);
      k_sums.add(weights, rows_of(operands.q, token, head, queries), slice, chunk);
    }
  }
  const int64_t token = sizes.token(sample, key_tile);
  k_sums.store_rows(d_k, token, group, keys, slice, [&](int) { return sizes.scale; });
  v_sums.store_rows(d_v, token, group, keys, slice, [](int) { return 1.0f; });
}

// Keys ascending.
template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads)
    plain_backward_queries(AttentionSizes sizes, BackwardOperands<T> operands, DeviceHeads<T> d_q) {
  __shared__ SharedTile chunk, weights;
  const BlockPlace place(sizes, sizes.heads());
  const int sample = place.sample;
  const int query_tile = ((sizes.sequence - 1) / kTile - place.tile) * kTile;
  const int queries = min(kTile, sizes.sequence - query_tile);
  const int slice = static_cast<int>(blockIdx.y) * kSlice;

  SliceSums<kChunks> sums;
  const int first_key = sizes.first_key(sample, query_tile) / kTile * kTile;
  for (int key_tile = first_key; key_tile < query_tile + queries; key_tile += kTile) {
    float p[4][4], d_scores[4][4];
    recompute(sizes, operands, sample, place.head, query_tile, key_tile, chunk, p, d_scores);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) weights.row[own_column() + j][own_row() + i] = d_scores[i][j];
    }
    const int group = place.head / sizes.heads_per_group;
    sums.add(weights, rows_of(operands.k, sizes.token(sample, key_tile), group, sizes.sequence - key_tile), slice,
             chunk);
  }
  sums.store_rows(d_q, sizes.token(sample, query_tile), place.head, queries, slice, [&](int) { return sizes.scale; });
}

dim3 grid_of(const AttentionSizes& sizes, int heads) {
  return dim3(attention_blocks(sizes, heads, kTile), static_cast<unsigned>((sizes.head_dim + kSlice - 1) / kSlice));
}

// f(integral constant): chunks of a slice, enough for head_dim.
template <class F>
void with_chunks(int head_dim, F f) {
  if (head_dim <= kTile) return f(std::integral_constant<int, 1>{});
  if (head_dim <= 2 * kTile) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 4>{});
}

// q, k and v are read from memory again for each pair of tiles and multiplied in fp32, in 64 × 64 products.
class PlainAttention : public AttentionBackend {
 public:
  std::string name() const override { return "plain"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    const DType dtype = q.buffer.dtype();
    if (dtype != DType::kF32 && dtype != DType::kBF16) return format("it takes f32 and bf16, not {}", name_of(dtype));
    if (q.head_dim > 512) return format("head_dim is {}; it takes up to 512", q.head_dim);
    return common_attention_refusal(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
    if (q.tokens() == 0) return;
    const AttentionSizes sizes(params, q);
    visit_float("attention_forward", q.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
      using E = Element<T>;
      with_chunks(sizes.head_dim, [&](auto chunks) {
        plain_forward<E, chunks.value><<<grid_of(sizes, sizes.heads()), kThreads, 0, cuda_handle(stream)>>>(
            sizes, DeviceHeads<const E>(q), DeviceHeads<const E>(k), DeviceHeads<const E>(v), DeviceHeads<E>(out),
            lse.data<float>());
      });
    });
    check_launch("plain attention_forward");
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    if (q.tokens() == 0) return;
    const AttentionSizes sizes(params, q);
    visit_float("attention_backward", q.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
      using E = Element<T>;
      fill_attention_delta<E, 1>(stream, out, d_out, delta.data<float>());
      const BackwardOperands<E> operands{DeviceHeads<const E>(q),     DeviceHeads<const E>(k), DeviceHeads<const E>(v),
                                         DeviceHeads<const E>(d_out), lse.data<float>(),       delta.data<float>()};
      with_chunks(sizes.head_dim, [&](auto chunks) {
        plain_backward_keys<E, chunks.value><<<grid_of(sizes, sizes.groups), kThreads, 0, cuda_handle(stream)>>>(
            sizes, operands, DeviceHeads<E>(d_k), DeviceHeads<E>(d_v));
        check_launch("plain attention_backward, keys");
        plain_backward_queries<E, chunks.value>
            <<<grid_of(sizes, sizes.heads()), kThreads, 0, cuda_handle(stream)>>>(sizes, operands, DeviceHeads<E>(d_q));
        check_launch("plain attention_backward, queries");
      });
    });
  }
};

}  // namespace

const AttentionBackend& plain_attention() {
  static const PlainAttention backend;
  return backend;
}

}  // namespace invar::ops::cuda
