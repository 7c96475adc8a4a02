#pragma once

#include <span>

#include "core/range.h"
#include "core/split_mix.h"
#include "core/tensor.h"
#include "device/stream.h"
#include "ops/logical_index.h"

namespace invar {

// A logical tensor (fp32, row-major) is hashed in blocks of this many elements; the last one may be shorter.
constexpr int64_t kHashBlock = 4096;

constexpr int64_t hash_blocks(int64_t elements) {
  return (elements + kHashBlock - 1) / kHashBlock;
}

// What an element adds to the hash of its block.
constexpr uint64_t hash_term(int64_t logical_index, uint32_t bits) {
  return split_mix(static_cast<uint64_t>(logical_index) % kHashBlock << 32 | bits);
}

namespace ops {

// Rows of a tensor's storage. index: of these in the logical tensor, or in several that lie one after another. Each of
// those begins where a block does. row_stride is block, so that the rows of a block of columns follow each other.
struct HashedRows {
  Range rows;
  LogicalIndex index;
};

// Adds the terms of these rows of values (rows, cols) to the hashes of the blocks they lie in, i64 (blocks). These are
// sums modulo 2⁶⁴, which do not depend on the order. values are f32, or bf16 and hashed as the fp32 of the same value.
// With rounded kBF16, f32 values are hashed as what they round to, as weights are in a working copy.
void add_block_hashes(const Stream& stream, const Tensor& values, std::span<const HashedRows> runs,
                      const Tensor& blocks, DType rounded = DType::kF32);

}  // namespace ops
}  // namespace invar
