#include <algorithm>
#include <type_traits>

#include "core/integer.h"
#include "core/range.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/tiled_attention.cuh"

namespace invar::ops::cuda {
namespace {

// What a block owns kRows of, 16 to a warp: it sums their gradients while tiles of the other kind pass by.
enum class Owned { kKeys, kQueries };

template <Owned kOwned_, int kHeadDim_, int kWarps_, int kPassing_, int kStages_>
struct BackwardTiles {
  static constexpr Owned kOwned = kOwned_;
  static constexpr int kHeadDim = kHeadDim_;  // a smaller one is padded with zeros
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kRows = 16 * kWarps_;
  static constexpr int kPassing = kPassing_;  // rows of a passing tile
  static constexpr int kStages = kStages_;    // 2: the next passing tile is on its way during the products
  // Output columns of a block; keys have two gradients to keep in registers.
  static constexpr int kSlice = std::min(kHeadDim, kOwned == Owned::kKeys ? 128 : 256);
  static constexpr int kTileBytes = 4 * kHeadDim * (kRows + kStages * kPassing);
  static constexpr int kSharedBytes = kTileBytes + kStages * kPassing * 3 * 4;
  static_assert(kRows % kPassing == 0 && kPassing <= kThreads);
};

// What a query's row of scores is differentiated with. A query past the end of the sample has zeros, as it has for q
// and d_out: it adds nothing.
struct QueryValues {
  float lse = 0.0f;
  float delta = 0.0f;
  int document_start = 0;

  QueryValues() = default;
  __device__ QueryValues(const TiledBackward& call, int sample, int head, int query) {
    const AttentionSizes& sizes = call.sizes;
    if (query >= sizes.sequence) return;
    const int64_t row = sizes.token(sample, query) * call.row_heads + head;
    lse = call.lse[row];
    delta = call.delta[row];
    document_start = sizes.document_start(sample, query);
  }
};

// One stage of a passing tile in shared memory.
template <class Tiles>
struct Passing {
  SwizzledTile<Tiles::kHeadDim> first;   // q, or k
  SwizzledTile<Tiles::kHeadDim> second;  // d_out, or v
  const float* lse;                      // of passing queries, as are the next two
  const float* delta;
  const int* document_start;  // not there without documents

  __device__ Passing(unsigned char* shared, int stage)
      : first{SwizzledTile<Tiles::kHeadDim>{shared_address(shared)}.end(2 * (Tiles::kRows + stage * Tiles::kPassing))},
        second{first.end(Tiles::kPassing)},
        lse(reinterpret_cast<float*>(shared + Tiles::kTileBytes) + stage * 3 * Tiles::kPassing),
        delta(lse + Tiles::kPassing),
        document_start(reinterpret_cast<const int*>(delta + Tiles::kPassing)) {}

  __device__ void copy(const TiledBackward& call, int sample, int head, int position) const {
    const AttentionSizes& sizes = call.sizes;
    const int64_t token = sizes.token(sample, position);
    const int count = sizes.sequence - position;
    constexpr bool kQueriesPass = Tiles::kOwned == Owned::kKeys;
    const InputHeads& x = kQueriesPass ? call.q : call.k;
    const InputHeads& y = kQueriesPass ? call.d_out : call.v;
    copy_rows_async<Tiles::kPassing, Tiles::kThreads>(x.at(token, head), x.token_stride, count, x.head_dim, first);
    copy_rows_async<Tiles::kPassing, Tiles::kThreads>(y.at(token, head), y.token_stride, count, y.head_dim, second);
    if constexpr (kQueriesPass) {
      const int i = static_cast<int>(threadIdx.x);
      if (i >= Tiles::kPassing) return;
      const bool exists = i < count;
      const int64_t query = token + (exists ? i : 0);
      cp_async<4>(shared_address(lse + i), call.lse + query * call.row_heads + head, exists);
      cp_async<4>(shared_address(delta + i), call.delta + query * call.row_heads + head, exists);
      if (sizes.document_starts == nullptr) return;
      cp_async<4>(shared_address(document_start + i), sizes.document_starts + query, exists);
    }
  }

  __device__ QueryValues query(const AttentionSizes& sizes, int i) const {
    QueryValues values;
    values.lse = lse[i];
    values.delta = delta[i];
    if (sizes.document_starts != nullptr) values.document_start = document_start[i];
    return values;
  }
};

// From scores (owned, passing) and dO·Vᵀ, or its transpose: p = exp(scale · score − lse), 0 where nothing is seen, and
// d_scores = p ∘ (dO·Vᵀ − delta), in place. `own` are the queries of the thread's rows, if queries are owned.
template <class Tiles, int kN>
__device__ void differentiate_softmax(const AttentionSizes& sizes, const Passing<Tiles>& passing,
                                      const QueryValues (&own)[2], int first_owned, int first_passing, bool all_visible,
                                      WarpTile<1, kN>& scores, WarpTile<1, kN>& d_scores) {
  const LanePlace place;
  const float factor = sizes.scale * kLog2E;
  constexpr bool kOwnsKeys = Tiles::kOwned == Owned::kKeys;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * n + place.column() + e % 2;
      const QueryValues query = kOwnsKeys ? passing.query(sizes, column) : own[e / 2];
      const int row_position = first_owned + place.row(e / 2);
      const int column_position = first_passing + column;
      const int query_position = kOwnsKeys ? column_position : row_position;
      const int key_position = kOwnsKeys ? row_position : column_position;
      float& p = scores.at[0][n][e];
      float& d_score = d_scores.at[0][n][e];
      p = fast_exp2(fmaf(p, factor, -kLog2E * query.lse));
      if (!all_visible && !sizes.visible(query_position, key_position, query.document_start)) p = 0.0f;
      d_score = p * (d_score - query.delta);
    }
  }
}

// The passing tiles of a block, in order: for keys the query heads of the group one after another.
struct Passage {
  int first;  // position of the first tile
  int tiles_per_head;
  int first_head;
  int heads;

  __device__ int size() const { return tiles_per_head * heads; }
  __device__ int head(int step) const { return first_head + step / tiles_per_head; }
};

template <class Tiles>
__device__ Passage passage_of(const AttentionSizes& sizes, int sample, int owned_head, int first_row, int last_row) {
  if constexpr (Tiles::kOwned == Owned::kKeys) {
    const int queries = sizes.end_of_queries(sample, last_row) - first_row;
    return {first_row, (queries + Tiles::kPassing - 1) / Tiles::kPassing, owned_head * sizes.heads_per_group,
            sizes.heads_per_group};
  } else {
    const int first = sizes.first_key(sample, first_row) / Tiles::kPassing * Tiles::kPassing;
    return {first, (last_row - first) / Tiles::kPassing + 1, owned_head / sizes.heads_per_group, 1};
  }
}

// True if every owned row and every passing row see each other.
template <class Tiles>
__device__ bool sees_everything(const AttentionSizes& sizes, const Passing<Tiles>& passing, int first_owned,
                                int last_owned, int last_owned_start, int first_passing) {
  if constexpr (Tiles::kOwned == Owned::kKeys) {
    const int last = min(Tiles::kPassing, sizes.sequence - first_passing) - 1;
    return sizes.visible(first_passing, first_owned + Tiles::kRows - 1, 0) &&
           sizes.visible(first_passing + last, first_owned, passing.query(sizes, last).document_start);
  } else {
    return sizes.visible(first_owned, first_passing + Tiles::kPassing - 1, 0) &&
           sizes.visible(last_owned, first_passing, last_owned_start);
  }
}

template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads) tiled_backward(const __grid_constant__ TiledBackward call) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  constexpr bool kOwnsKeys = Tiles::kOwned == Owned::kKeys;
  constexpr int kRows = Tiles::kRows, kThreads = Tiles::kThreads, kN = Tiles::kPassing / 8;
  const SwizzledTile<Tiles::kHeadDim> first_owned{shared_address(shared_memory)};  // k, or q
  const SwizzledTile<Tiles::kHeadDim> second_owned{first_owned.end(kRows)};        // v, or d_out

  const AttentionSizes& sizes = call.sizes;
  const BlockPlace place(sizes, kOwnsKeys ? sizes.groups : sizes.heads());
  const int sample = place.sample;
  const int tile = kOwnsKeys ? place.tile : (sizes.sequence - 1) / kRows - place.tile;
  const int first_row = tile * kRows;
  const int rows = min(kRows, sizes.sequence - first_row);
  const int last_row = first_row + rows - 1;
  const int slice = static_cast<int>(blockIdx.y) * Tiles::kSlice;
  const int warp_row = LanePlace().warp * 16;
  const int64_t token = sizes.token(sample, first_row);
  const Passage passage = passage_of<Tiles>(sizes, sample, place.head, first_row, last_row);
  const int steps = passage.size();
  const auto position = [&](int step) { return passage.first + step % passage.tiles_per_head * Tiles::kPassing; };
  const auto copy = [&](int step) {
    if (step == steps) return;
    Passing<Tiles>(shared_memory, step % Tiles::kStages).copy(call, sample, passage.head(step), position(step));
    cp_async_commit();
  };

  const InputHeads& x = kOwnsKeys ? call.k : call.q;
  const InputHeads& y = kOwnsKeys ? call.v : call.d_out;
  copy_rows_async<kRows, kThreads>(x.at(token, place.head), x.token_stride, rows, x.head_dim, first_owned);
  copy_rows_async<kRows, kThreads>(y.at(token, place.head), y.token_stride, rows, y.head_dim, second_owned);
  copy(0);
  QueryValues own[2];
  int last_owned_start = 0;
  if constexpr (!kOwnsKeys) {
    for (int i = 0; i < 2; ++i) {
      own[i] = QueryValues(call, sample, place.head, first_row + warp_row + LanePlace().row(i));
    }
    last_owned_start = sizes.document_start(sample, last_row);
  }

  WarpTile<1, Tiles::kSlice / 8> sums;                                                             // of d_k, or d_q
  std::conditional_t<kOwnsKeys, WarpTile<1, Tiles::kSlice / 8>, std::type_identity<void>> v_sums;  // of d_v
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<0>();
    __syncthreads();  // this step's tile is there, and nobody reads the one before
    if constexpr (Tiles::kStages == 2) copy(step + 1);
    const Passing<Tiles> passing(shared_memory, step % Tiles::kStages);
    WarpTile<1, kN> scores, d_scores;
    scores.add_row_products(first_owned, warp_row, passing.first);
    d_scores.add_row_products(second_owned, warp_row, passing.second);
    const bool all_visible = sees_everything(sizes, passing, first_row, last_row, last_owned_start, position(step));
    differentiate_softmax(sizes, passing, own, first_row + warp_row, position(step), all_visible, scores, d_scores);
    if constexpr (kOwnsKeys) v_sums.add_weighted_rows(scores, passing.second, slice);
    sums.add_weighted_rows(d_scores, passing.first, slice);
    if constexpr (Tiles::kStages == 1) {
      __syncthreads();  // nobody reads this step's tile
      copy(step + 1);
    }
  }

  const auto store = [&](const auto& tile, const auto& to, float factor) {
    store_warp_tile(tile, to, token, place.head, warp_row, rows, slice, [=](int, int) { return factor; });
  };
  if constexpr (!kOwnsKeys) {
    store(sums, call.d_q, sizes.scale);
  } else if (call.k_terms.first != nullptr) {
    store(sums, call.k_terms, sizes.scale);
    store(v_sums, call.v_terms, 1.0f);
  } else {
    store(sums, call.d_k, sizes.scale);
    store(v_sums, call.d_v, 1.0f);
  }
}

template <Owned kOwned, int kHeadDim, int kWarps, int kPassing, int kStages>
void launch_stages(const Stream& stream, const TiledBackward& call) {
  using Tiles = BackwardTiles<kOwned, kHeadDim, kWarps, kPassing, kStages>;
  static_assert(kStages == 2 || Tiles::kSharedBytes <= kTiledAttentionSharedBytes);
  const int heads = kOwned == Owned::kKeys ? call.sizes.groups : call.sizes.heads();
  launch_tiles(stream, "tiled attention_backward", tiled_backward<Tiles>, tiles_grid<Tiles>(call.sizes, heads),
               Tiles::kThreads, Tiles::kSharedBytes, call);
}

// Two stages where the GPU has the shared memory; both sum in one order.
template <Owned kOwned, int kHeadDim, int kWarps, int kPassing>
void launch(const Stream& stream, const TiledBackward& call) {
  constexpr int kBytes = BackwardTiles<kOwned, kHeadDim, kWarps, kPassing, 2>::kSharedBytes;
  if constexpr (kBytes > kTiledAttentionSharedBytes) {
    if (kBytes > shared_bytes_per_block(stream.cuda().device())) {
      return launch_stages<kOwned, kHeadDim, kWarps, kPassing, 1>(stream, call);
    }
  }
  launch_stages<kOwned, kHeadDim, kWarps, kPassing, 2>(stream, call);
}

// Of a block, each with 16 of its rows.
constexpr int warps_for(int head_dim) {
  return head_dim <= 256 ? 8 : 4;
}

template <Owned kOwned>
void launch_owned(const Stream& stream, const TiledBackward& call) {
  if (call.sizes.head_dim <= 64) return launch<kOwned, 64, warps_for(64), 64>(stream, call);
  if (call.sizes.head_dim <= 128) return launch<kOwned, 128, warps_for(128), 64>(stream, call);
  if (call.sizes.head_dim <= 256) return launch<kOwned, 256, warps_for(256), 32>(stream, call);
  launch<kOwned, 512, warps_for(512), 16>(stream, call);
}

// With so few blocks for the keys of a head each query head has its own, and what they give is added up: a GPU is full,
// and the blocks are even. The choice may not depend on the groups or samples of a call, or bits would.
constexpr int64_t kFewBlocks = 256;
bool goes_by_query_heads(const AttentionSizes& sizes) {
  const int64_t blocks = ceil_div(sizes.sequence, 16 * warps_for(sizes.head_dim)) * ceil_div(sizes.head_dim, 128);
  return sizes.heads_per_group > 1 && blocks <= kFewBlocks;
}

// Of each group the sum of its heads' terms (T, heads, [k, v] · D), in ascending order; two elements a thread.
struct HeadSums {
  const float* terms;
  OutputHeads d_k, d_v;
  int groups, heads_per_group, head_dim;

  struct Values {
    int64_t token;
    int group, element;  // the first of two, of [k, v]
    float2 sum;
  };
  __device__ void read(int64_t i, Values& values) const {
    const int64_t row = quotient(i, static_cast<uint32_t>(head_dim));  // of tokens and groups; i counts pairs
    values.token = quotient(row, static_cast<uint32_t>(groups));
    values.group = static_cast<int>(row - values.token * groups);
    values.element = static_cast<int>(i - row * head_dim) * 2;
    const float* from = terms + row * heads_per_group * 2 * head_dim + values.element;
    float2 sum = *reinterpret_cast<const float2*>(from);
    for (int h = 1; h < heads_per_group; ++h) {
      const float2 term = *reinterpret_cast<const float2*>(from + static_cast<int64_t>(h) * 2 * head_dim);
      sum = make_float2(__fadd_rn(sum.x, term.x), __fadd_rn(sum.y, term.y));
    }
    values.sum = sum;
  }
  __device__ void write(int64_t, const Values& values) const {
    const bool of_values = values.element >= head_dim;
    const OutputHeads& to = of_values ? d_v : d_k;
    store_pair(to.at(values.token, values.group) + values.element - (of_values ? head_dim : 0), values.sum.x,
               values.sum.y);
  }
};

// Of some samples and groups.
TiledBackward part_of(TiledBackward call, Range samples, Range groups) {
  const int64_t tokens = samples.begin * call.sizes.sequence;
  const auto move = [&](auto&... heads) {
    ((heads.first += tokens * heads.token_stride + groups.begin * heads.group_stride), ...);
  };
  move(call.q, call.k, call.v, call.d_out, call.d_q, call.d_k, call.d_v);
  const int64_t row = tokens * call.row_heads + groups.begin * call.sizes.heads_per_group;
  call.lse += row;
  call.delta += row;
  if (call.sizes.document_starts != nullptr) call.sizes.document_starts += tokens;
  call.sizes.samples = static_cast<int>(samples.size());
  call.sizes.groups = static_cast<int>(groups.size());
  return call;
}

void launch_by_query_heads(const Stream& stream, const TiledBackward& call, float* terms) {
  const AttentionSizes& sizes = call.sizes;
  TiledBackward by_heads = call;
  by_heads.sizes.groups = sizes.heads();
  by_heads.sizes.heads_per_group = 1;
  by_heads.k = call.k.for_query_heads(sizes.heads_per_group);
  by_heads.v = call.v.for_query_heads(sizes.heads_per_group);
  DeviceHeads<float>& k_terms = by_heads.k_terms;
  k_terms.first = terms;
  k_terms.token_stride = int64_t{sizes.heads()} * 2 * sizes.head_dim;
  k_terms.group_stride = 2 * sizes.head_dim;
  k_terms.heads_per_group = 1;
  k_terms.head_dim = sizes.head_dim;
  k_terms.head_stride = 0;
  by_heads.v_terms = k_terms;
  by_heads.v_terms.first += sizes.head_dim;
  launch_owned<Owned::kKeys>(stream, by_heads);
  const int64_t tokens = int64_t{sizes.samples} * sizes.sequence;
  run_elementwise(stream, "tiled attention_backward", tokens * sizes.groups * sizes.head_dim,
                  HeadSums{terms, call.d_k, call.d_v, sizes.groups, sizes.heads_per_group, sizes.head_dim});
}

}  // namespace

void launch_tiled_backward(const Stream& stream, const TiledBackward& call) {
  launch_owned<Owned::kQueries>(stream, call);
  const AttentionSizes& sizes = call.sizes;
  if (!goes_by_query_heads(sizes)) return launch_owned<Owned::kKeys>(stream, call);
  const int64_t of_group =
      int64_t{sizes.sequence} * sizes.heads_per_group * 2 * sizes.head_dim * int64_t{sizeof(float)};
  const int64_t groups = std::clamp<int64_t>(kTiledTermBytes / of_group, 1, sizes.groups);
  const int64_t samples =
      groups < sizes.groups ? 1 : std::clamp<int64_t>(kTiledTermBytes / (of_group * groups), 1, sizes.samples);
  auto* terms = static_cast<float*>(stream.cuda().workspace(samples * groups * of_group));
  for (int64_t sample = 0; sample < sizes.samples; sample += samples) {
    for (int64_t group = 0; group < sizes.groups; group += groups) {
      const Range some_samples{sample, std::min<int64_t>(sample + samples, sizes.samples)};
      const Range some_groups{group, std::min<int64_t>(group + groups, sizes.groups)};
      launch_by_query_heads(stream, part_of(call, some_samples, some_groups), terms);
    }
  }
}

}  // namespace invar::ops::cuda
