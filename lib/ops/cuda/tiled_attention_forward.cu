#include "ops/cuda/tiled_attention.cuh"

namespace invar::ops::cuda {
namespace {

// A block: kRows queries against kKeys keys at a time, and kSlice output columns.
template <int kHeadDim_, int kM_, int kWarps_, int kKeys_>
struct ForwardTiles {
  static constexpr int kHeadDim = kHeadDim_;  // a smaller one is padded with zeros
  static constexpr int kM = kM_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kRows = 16 * kM * kWarps_;
  static constexpr int kSlice = kHeadDim < 256 ? kHeadDim : 256;
  static constexpr int kSharedBytes = 2 * (kRows * kHeadDim + kKeys * (kHeadDim + kSlice));
  static_assert(kSharedBytes <= kTiledAttentionSharedBytes);
};

// The softmax of a thread's rows so far, in scores to be multiplied by `factor` and raised to powers of 2. Every lane
// of a row holds the largest; each has the sum of its own columns.
template <int kM>
struct WarpSoftmax {
  float factor;
  float largest[kM][2];
  float sum[kM][2] = {};

  __device__ explicit WarpSoftmax(float scale) : factor(fmaxf(fabsf(scale) * kLog2E, 1e-37f)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) largest[m][0] = largest[m][1] = -INFINITY;
  }

  // Turns the scores of row i of tile m into probabilities over 2^(largest so far); returns by what earlier sums
  // shrink.
  template <int kN>
  __device__ float update(int m, int i, WarpTile<kM, kN>& scores) {
    float row_largest = largest[m][i];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      row_largest = fmaxf(row_largest, fmaxf(scores.at[m][n][2 * i], scores.at[m][n][2 * i + 1]));
    }
    row_largest = fmaxf(row_largest, __shfl_xor_sync(0xffffffffu, row_largest, 1));
    row_largest = fmaxf(row_largest, __shfl_xor_sync(0xffffffffu, row_largest, 2));
    // A row that has seen no key: its probabilities are 2^-inf, not 2^(inf − inf).
    const float top = row_largest == -INFINITY ? 0.0f : row_largest * factor;
    const float correction = fast_exp2(largest[m][i] * factor - top);
    largest[m][i] = row_largest;
    float row_sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        scores.at[m][n][j] = fast_exp2(fmaf(scores.at[m][n][j], factor, -top));
        row_sum += scores.at[m][n][j];
      }
    }
    sum[m][i] = fmaf(sum[m][i], correction, row_sum);
    return correction;
  }

  __device__ float total(int m, int i) const {
    return lane_sum<4>(sum[m][i]);
  }
};

// Hides what the queries of the warp, from first_query on, do not see.
template <int kM, int kN>
__device__ void mask_scores(const AttentionSizes& sizes, int sample, int first_query, int first_key,
                            WarpTile<kM, kN>& scores) {
  const LanePlace place;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + 16 * m + place.row(i);
      const int start = sizes.document_start(sample, min(query, sizes.sequence - 1));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = first_key + 8 * n + place.column() + j;
          if (!sizes.visible(query, key, start)) scores.at[m][n][2 * i + j] = -INFINITY;
        }
      }
    }
  }
}

template <int kM, int kN>
__device__ void negate(WarpTile<kM, kN>& tile) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) tile.at[i / (4 * kN)][i / 4 % kN][i % 4] *= -1.0f;
}

template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads) tiled_forward(const __grid_constant__ TiledForward call) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  constexpr int kHeadDim = Tiles::kHeadDim, kM = Tiles::kM, kKeys = Tiles::kKeys, kThreads = Tiles::kThreads;
  const SwizzledTile<kHeadDim> q_tile{shared_address(shared_memory)};
  const SwizzledTile<kHeadDim> k_tile{q_tile.end(Tiles::kRows)};
  const SwizzledTile<Tiles::kSlice> v_tile{k_tile.end(kKeys)};

  const AttentionSizes& sizes = call.sizes;
  const BlockPlace place(sizes, sizes.heads());
  const int group = place.head / sizes.heads_per_group;
  const int first_query = ((sizes.sequence - 1) / Tiles::kRows - place.tile) * Tiles::kRows;
  const int queries = min(Tiles::kRows, sizes.sequence - first_query);
  const int last_query = first_query + queries - 1;
  const int last_start = sizes.document_start(place.sample, last_query);
  const int slice = static_cast<int>(blockIdx.y) * Tiles::kSlice;
  const int warp_row = LanePlace().warp * 16 * kM;
  const int64_t query_token = sizes.token(place.sample, first_query);

  const auto copy_keys = [&](int key) {
    copy_rows_async<kKeys, kThreads>(call.k.at(sizes.token(place.sample, key), group), call.k.token_stride,
                                     sizes.sequence - key, sizes.head_dim, k_tile);
  };
  const auto copy_values = [&](int key) {
    copy_rows_async<kKeys, kThreads>(call.v.at(sizes.token(place.sample, key), group) + slice, call.v.token_stride,
                                     sizes.sequence - key, sizes.head_dim - slice, v_tile);
  };

  WarpTile<kM, Tiles::kSlice / 8> sums;
  WarpSoftmax<kM> softmax(sizes.scale);
  int key = sizes.first_key(place.sample, first_query) / kKeys * kKeys;
  copy_rows_async<Tiles::kRows, kThreads>(call.q.at(query_token, place.head), call.q.token_stride, queries,
                                          sizes.head_dim, q_tile);
  copy_keys(key);
  cp_async_commit();
  for (; key <= last_query; key += kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // the keys are there, and nobody reads the values of the tile before
    copy_values(key);
    cp_async_commit();
    WarpTile<kM, kKeys / 8> scores;
    scores.add_row_products(q_tile, warp_row, k_tile);
    cp_async_wait<0>();
    __syncthreads();  // the values are there, and nobody reads the keys
    if (key + kKeys <= last_query) copy_keys(key + kKeys);
    cp_async_commit();

    if (sizes.scale < 0.0f) negate(scores);
    const bool all_visible = key + kKeys - 1 <= first_query && last_query - key < sizes.window && last_start <= key;
    if (!all_visible) mask_scores(sizes, place.sample, first_query + warp_row, key, scores);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float correction = softmax.update(m, i, scores);
#pragma unroll
        for (int n = 0; n < Tiles::kSlice / 8; ++n) {
          sums.at[m][n][2 * i] *= correction;
          sums.at[m][n][2 * i + 1] *= correction;
        }
      }
    }
    sums.add_weighted_rows(scores, v_tile, 0);
  }

  const LanePlace lane;
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = softmax.total(m, i);
      factor[m][i] = 1.0f / total;
      const int row = warp_row + 16 * m + lane.row(i);
      if (slice == 0 && lane.column() == 0 && row < queries) {
        call.lse[(query_token + row) * sizes.heads() + place.head] =
            kLn2 * fmaf(softmax.largest[m][i], softmax.factor, log2f(total));
      }
    }
  }
  store_warp_tile(sums, call.out, query_token, place.head, warp_row, queries, slice,
                  [&](int m, int i) { return factor[m][i]; });
}

template <class Tiles>
void launch(const Stream& stream, const TiledForward& call) {
  launch_tiles(stream, "tiled attention_forward", tiled_forward<Tiles>,
               tiles_grid<Tiles>(call.sizes, call.sizes.heads()), Tiles::kThreads, Tiles::kSharedBytes, call);
}

}  // namespace

void launch_tiled_forward(const Stream& stream, const TiledForward& call) {
  if (call.sizes.head_dim <= 64) return launch<ForwardTiles<64, 2, 4, 64>>(stream, call);
  if (call.sizes.head_dim <= 128) return launch<ForwardTiles<128, 2, 4, 64>>(stream, call);
  if (call.sizes.head_dim <= 256) return launch<ForwardTiles<256, 1, 8, 64>>(stream, call);
  launch<ForwardTiles<512, 1, 4, 64>>(stream, call);
}

}  // namespace invar::ops::cuda
