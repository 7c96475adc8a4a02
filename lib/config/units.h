#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"

namespace invar {

// Tensor parallelism cuts weights in whole units. These rules depend on the global shape only, never on the degree, so
// that every layout cuts the same model.

// Where run `part` begins if `units` are cut in `parts` contiguous runs, as even as can be, the longer ones first.
constexpr int64_t run_begin(int64_t units, int64_t parts, int64_t part) {
  const int64_t longer = units % parts;
  return part * (units / parts) + (part < longer ? part : longer);
}

// With that many leaves: runs into which the query heads of each KV head are cut, as even as can be. One
// if the KV heads alone are leaves enough, else as many as it takes, at most one for each query head.
constexpr int64_t head_runs(int64_t heads_per_group, int64_t kv_heads, int64_t leaves) {
  return leaves <= kv_heads ? 1 : std::min(heads_per_group, ceil_div(leaves, kv_heads));
}

// A unit of the vocabulary, in rows of the embedding and the head.
inline constexpr int64_t kVocabUnit = 16;

// Rows of the embedding and the head: the vocabulary rounded up to a multiple of 128.
constexpr int64_t padded_vocab_size(int64_t vocab_size) {
  return round_up(vocab_size, 128);
}

constexpr int64_t vocab_units(int64_t vocab_size) {
  return padded_vocab_size(vocab_size) / kVocabUnit;
}

// Columns of one FFN block: the largest power of two up to 32 that divides the intermediate size and leaves at least 64
// blocks, so that unequal runs stay well balanced; 1 if there is none.
constexpr int64_t ffn_block_width(int64_t intermediate_size) {
  for (int64_t width = 32; width > 1; width /= 2) {
    if (intermediate_size % width == 0 && intermediate_size / width >= 64) return width;
  }
  return 1;
}

constexpr int64_t ffn_blocks(int64_t intermediate_size) {
  return intermediate_size / ffn_block_width(intermediate_size);
}

// Columns of one block of the per-layer embeddings' width: the largest number up to 32 that divides it and leaves at
// least 8 blocks; 1 if there is none.
constexpr int64_t per_layer_block_width(int64_t width) {
  for (int64_t block = 32; block > 1; --block) {
    if (width % block == 0 && width / block >= 8) return block;
  }
  return 1;
}

constexpr int64_t per_layer_blocks(int64_t width) {
  return width / per_layer_block_width(width);
}

}  // namespace invar
