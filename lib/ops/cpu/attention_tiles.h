#pragma once

#include <algorithm>

#include "core/integer.h"
#include "ops/attention.h"
#include "ops/cpu/element.h"
#include "ops/cpu/tile_product.h"
#include "ops/dispatch.h"

// How tiled attention cuts a call into pairs of query and key tiles, and what it does with one pair.
namespace invar::ops::cpu {

// Queries, and keys, of a tile. At head_dim 128 the dozen tiles of backward take 600 KB: a second-level cache.
constexpr int64_t kTile = 96;
static_assert(kTile % kPanelRows == 0 && kTile % kPanelColumns == 0);

// Which queries and keys of a pair of tiles see each other: query − window < key − shift ≤ query, where indices start
// at the tiles and shift is the distance from the first key to the first query; and no key before the query's document.
struct Band {
  int64_t queries;
  int64_t keys;
  int64_t shift;
  int64_t window;
  const int32_t* document_starts;  // of each query, in the sample, not falling; null if they hide none of the keys
  int64_t first_key;               // in the sample

  Range keys_of(Range query) const {
    return intersect(
        {std::max(query.begin + shift - window + 1, first_key_of_document(query.begin)), query.end + shift}, {0, keys});
  }
  Range queries_of(Range key) const {
    return intersect({key.begin - shift, key.end - 1 - shift + window}, {0, queries_by_document(key.end - 1)});
  }
  // Overwrites the pairs of a (keys, queries) tile that do not see each other.
  void mask(Tile& tile, float value) const {
    for (int64_t key = 0; key < keys; ++key) {
      const Range visible = queries_of({key, key + 1});
      float* row = tile.row(key);
      std::fill(row, row + std::min(visible.begin, queries), value);
      std::fill(row + std::min(visible.end, queries), row + queries, value);
    }
  }

 private:
  int64_t first_key_of_document(int64_t query) const {
    return document_starts == nullptr ? 0 : document_starts[query] - first_key;
  }
  // How many queries, from the first on, have a document that begins no later than the key.
  int64_t queries_by_document(int64_t key) const {
    if (document_starts == nullptr) return queries;
    return std::upper_bound(document_starts, document_starts + queries, first_key + key) - document_starts;
  }
};

// The sizes of one call, and the division of each sample into tiles.
struct AttentionTiling {
  int64_t sequence;
  int64_t window;  // never 0
  int64_t samples;
  int64_t groups;
  int64_t heads_per_group;
  int64_t head_dim;
  float scale;
  const int32_t* document_starts;  // (T), or null
  int64_t tiles;                   // of one sample

  AttentionTiling(const AttentionParams& params, const HeadView& q)
      : sequence(params.sequence_length),
        window(params.window == 0 ? sequence : std::min(params.window, sequence)),
        samples(q.tokens() / sequence),
        groups(q.groups),
        heads_per_group(q.heads_per_group),
        head_dim(q.head_dim),
        scale(params.scale),
        document_starts(params.document_starts.defined() ? params.document_starts.data<int32_t>() : nullptr),
        tiles(ceil_div(sequence, kTile)) {}

  Range tokens_of(int64_t index) const { return {index * kTile, std::min((index + 1) * kTile, sequence)}; }
  // The tiles with keys that some of the queries see; the sample begins at token sample_begin.
  Range key_tiles_of(int64_t sample_begin, Range queries) const {
    int64_t first_key = std::max<int64_t>(0, queries.begin - window + 1);
    if (document_starts != nullptr) {
      first_key = std::max<int64_t>(first_key, document_starts[sample_begin + queries.begin]);
    }
    return {first_key / kTile, ceil_div(queries.end, kTile)};
  }
  Band band(int64_t sample_begin, Range queries, Range keys) const {
    const int32_t* starts = document_starts == nullptr ? nullptr : document_starts + sample_begin + queries.begin;
    if (starts != nullptr && starts[queries.size() - 1] <= keys.begin) starts = nullptr;
    return {queries.size(), keys.size(), queries.begin - keys.begin, window, starts, keys.begin};
  }
};

// Tokens of one sample and one head, as a view holds them.
struct SampleHead {
  const HeadView& view;
  int64_t sample_begin;  // token
  int64_t head;          // of all groups

  int64_t index(int64_t token) const { return view.index(sample_begin + token, head); }
};

inline void load_rows(const SampleHead& from, Range tokens, float scale, Tile& to) {
  visit_float("attention", from.view.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    const T* elements = from.view.buffer.data<T>();
    for (int64_t i = 0; i < tokens.size(); ++i) {
      const T* source = elements + from.index(tokens.begin + i);
      float* row = to.row(i);
      for (int64_t d = 0; d < from.view.head_dim; ++d) row[d] = scale * load(source[d]);
    }
  });
}

// Rows of `from`, beginning at first_row, to the tokens.
inline void store_rows(const Tile& from, int64_t first_row, float scale, Range tokens, const SampleHead& to) {
  visit_float("attention", to.view.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    T* elements = to.view.buffer.data<T>();
    for (int64_t i = 0; i < tokens.size(); ++i) {
      const float* row = from.row(first_row + i);
      T* target = elements + to.index(tokens.begin + i);
      for (int64_t d = 0; d < to.view.head_dim; ++d) store(target[d], scale * row[d]);
    }
  });
}

inline void transpose(const Tile& from, int64_t rows, int64_t columns, Tile& to) {
  constexpr int64_t kBlock = 8;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = begin; column < end; ++column) to.row(column)[row] = from.row(row)[column];
    }
  }
}

inline void scale_rows(Tile& tile, int64_t rows, int64_t columns, const float* factors) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = tile.row(i);
    for (int64_t d = 0; d < columns; ++d) row[d] *= factors[i];
  }
}

inline void zero_rows(Tile& tile, int64_t rows) {
  std::fill(tile.row(0), tile.row(rows), 0.0f);
}

// scores (keys, queries) = k · q_tᵀ, where any pair of a panel is visible.
inline void score_product(const AttentionTiling& tiling, const Band& band, const Tile& k, const Tile& q_t,
                          Tile& scores) {
  tile_product(band.keys, band.queries, LeftFactor::plain(k), q_t, scores, false, [&](Range keys, Range queries) {
    return intersect(band.queries_of(keys), queries).empty() ? Range{} : Range{0, tiling.head_dim};
  });
}

// to (queries, D) += weightsᵀ · rows, with weights (keys, queries) and rows (keys, D).
inline void add_over_keys(const AttentionTiling& tiling, const Band& band, const Tile& weights, const Tile& rows,
                          Tile& to) {
  tile_product(band.queries, tiling.head_dim, LeftFactor::transposed(weights), rows, to, true,
               [&](Range queries, Range) { return band.keys_of(queries); });
}

}  // namespace invar::ops::cpu
