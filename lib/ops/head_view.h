#pragma once

#include "core/tensor.h"

namespace invar::ops {

// The heads of one kind (q, k or v) inside a (T, row) buffer whose rows hold one group after another:
// element (t, group, head, d) lies at t·row + group·group_stride + offset + head·head_dim + d.
// A fused QKV row of a KV group is [q heads of the group, k, v].
struct HeadView {
  Tensor buffer;                // (T, row), f32 or bf16
  int64_t groups = 0;           // KV groups on this rank
  int64_t heads_per_group = 0;  // query heads per group, or 1 for k and v
  int64_t head_dim = 0;
  int64_t group_stride = 0;  // elements from one group to the next
  int64_t offset = 0;        // elements from the start of a group to its first head

  int64_t tokens() const { return buffer.dim(0); }
  int64_t heads() const { return groups * heads_per_group; }
  int64_t token_stride() const { return buffer.dim(1); }
  // Index in the buffer of the first element of a head, 0 to heads() − 1.
  int64_t index(int64_t token, int64_t head) const {
    return token * token_stride() + head / heads_per_group * group_stride + offset + head % heads_per_group * head_dim;
  }
};

}  // namespace invar::ops
