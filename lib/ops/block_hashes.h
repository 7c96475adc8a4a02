#pragma once

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

// Adds the terms of values, f32 (rows, cols), to the hashes of the blocks they lie in: i64 (blocks of the tensor), sums
// modulo 2⁶⁴, which do not depend on the order. index: of the values in the tensor; row_stride is block, so that the
// rows of a block of columns follow each other.
void add_block_hashes(const Stream& stream, const Tensor& values, const LogicalIndex& index, const Tensor& blocks);

}  // namespace ops
}  // namespace invar
