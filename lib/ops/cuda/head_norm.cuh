#pragma once

#include <initializer_list>
#include <type_traits>

#include "ops/cuda/device_math.cuh"
#include "ops/norm.h"

// What the two directions of a head norm share. A head lies in the registers of a few lanes of one warp: each lane has
// packs of 16 bytes of the first half and the packs that rotate-half RoPE pairs with them. Heads that are not whole
// packs or wider than a warp holds take the plain kernels, one warp per head, which sum in another order: head_dim
// alone decides.
namespace invar::ops::cuda {

inline constexpr int kHeadThreads = 256;
inline constexpr int kHeadWarps = kHeadThreads / 32;

// A HeadView as rows of head_dim elements: (token, head) pairs, tokens outermost.
template <class T>
struct HeadRows {
  HeadRows(const HeadView& view, T* elements_of_view)
      : data(elements_of_view + view.offset),
        token_stride(view.token_stride()),
        group_stride(view.group_stride),
        heads_per_group(static_cast<uint32_t>(view.heads_per_group)),
        head_dim(static_cast<int>(view.head_dim)) {}

  __device__ T* row(int64_t token, uint32_t head) const {
    const uint32_t group = head / heads_per_group;
    const uint32_t head_of_group = head - group * heads_per_group;
    return data + token * token_stride + group * group_stride + static_cast<int64_t>(head_of_group) * head_dim;
  }

  T* data;
  int64_t token_stride, group_stride;
  uint32_t heads_per_group;
  int head_dim;
};

// cos is null if heads do not turn.
struct Rotation {
  explicit Rotation(const HeadNormRope& params) {
    if (params.rope == nullptr) return;
    cos = params.rope->cos.data<float>();
    sin = params.rope->sin.data<float>();
    half = params.rope->cos.dim(1);
    length = static_cast<uint32_t>(params.sequence_length);
    if (params.document_starts.defined()) starts = params.document_starts.data<int32_t>();
  }
  // Where the angles of a token begin in the tables.
  __device__ int64_t row(int64_t token) const {
    const int64_t position = token - quotient(token, length) * length;
    return (position - (starts == nullptr ? 0 : starts[token])) * half;
  }

  const float* cos = nullptr;
  const float* sin = nullptr;
  const int32_t* starts = nullptr;
  int64_t half = 0;
  uint32_t length = 1;
};

struct TokenHead {
  __device__ TokenHead(int64_t row, uint32_t heads)
      : token(quotient(row, heads)), head(static_cast<uint32_t>(row - token * heads)) {}
  int64_t token;
  uint32_t head;
};

// The part of a head that a lane has: kPacks packs of each half. Lanes beyond the head have zeros.
template <class T, int kLanes, int kPacks>
struct Part {
  static constexpr int kWidth = kVectorWidth<T>;
  using Packs = Pack<T, kWidth>[2][kPacks];
  using Floats = float[2][kPacks][kWidth];

  explicit __device__ Part(int head_dim) : half(head_dim / 2), lane(static_cast<int>(threadIdx.x) % kLanes) {}

  // The first element of a pack within its half; true if the head has it.
  __device__ int at(int p) const { return (p * kLanes + lane) * kWidth; }
  __device__ bool has(int p) const { return at(p) < half; }

  __device__ void read(bool valid, const T* head, Packs& packs) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!valid || !has(p)) continue;
      packs[0][p] = load_pack<kWidth>(head + at(p));
      packs[1][p] = load_pack<kWidth>(head + half + at(p));
    }
  }

  __device__ static void unpack(const Packs& packs, Floats& values) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[h][p][i] = packs[h][p][i];
      }
    }
  }

  // values = R(angles)·values, or its transpose.
  template <bool kBack>
  __device__ void rotate(const Rotation& rotation, int64_t angles, Floats& values) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!has(p)) continue;
      const auto cos = load_pack<kWidth>(rotation.cos + angles + at(p));
      const auto sin = load_pack<kWidth>(rotation.sin + angles + at(p));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float a = values[0][p][i];
        const float b = values[1][p][i];
        const float s = kBack ? -sin[i] : sin[i];
        values[0][p][i] = fmaf(a, cos[i], -(b * s));
        values[1][p][i] = fmaf(b, cos[i], a * s);
      }
    }
  }

  int half, lane;
};

// f(i) for the lane's elements of the first half of a head, the larger one if head_dim is odd; `half` on lies the
// partner of i, if the head has it.
template <class F>
__device__ void for_lane(int half, F&& f) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < half; i += 32) f(i);
}

// The elements of a lane's share of a head, 2 · packs · the width of a pack, must cover it. lanes = 0: the plain
// kernels.
struct HeadShape {
  int lanes = 0;
  int packs = 1;
};

// Error{kFault} for heads in packs that do not begin at multiples of 16 bytes.
template <class T>
HeadShape head_shape(std::string_view op, const HeadNormRope& params, std::initializer_list<const HeadView*> views) {
  constexpr int64_t kWidth = kVectorWidth<Element<T>>;
  const int64_t head_dim = (*views.begin())->head_dim;
  if (head_dim % (2 * kWidth) != 0 || head_dim > 2 * 2 * 32 * kWidth) return {};
  for (const HeadView* view : views) {
    const int64_t group_stride = view->groups > 1 ? view->group_stride : 0;
    const bool whole = view->offset % kWidth == 0 && view->token_stride() % kWidth == 0 && group_stride % kWidth == 0;
    INVAR_CHECK(whole, "{}: heads at {} elements of rows of {}, groups {} apart, are not all aligned to 16 bytes", op,
                view->offset, view->token_stride(), view->group_stride);
    expect_aligned(op, {view->buffer.raw()});
  }
  if (params.weight.defined()) expect_aligned(op, {params.weight.raw()});
  if (params.rope != nullptr) expect_aligned(op, {params.rope->cos.raw(), params.rope->sin.raw()});
  HeadShape shape{1, 1};
  while (shape.lanes < 32 && shape.lanes * 2 * kWidth < head_dim) shape.lanes *= 2;
  if (shape.lanes * 2 * kWidth < head_dim) shape.packs = 2;
  return shape;
}

// f(lanes, packs) with constants.
template <class F>
void visit_shape(HeadShape shape, F&& f) {
  constexpr auto kOne = std::integral_constant<int, 1>{};
  if (shape.packs == 2) return f(std::integral_constant<int, 32>{}, std::integral_constant<int, 2>{});
  switch (shape.lanes) {
    case 1:
      return f(std::integral_constant<int, 1>{}, kOne);
    case 2:
      return f(std::integral_constant<int, 2>{}, kOne);
    case 4:
      return f(std::integral_constant<int, 4>{}, kOne);
    case 8:
      return f(std::integral_constant<int, 8>{}, kOne);
    case 16:
      return f(std::integral_constant<int, 16>{}, kOne);
    default:
      return f(std::integral_constant<int, 32>{}, kOne);
  }
}

}  // namespace invar::ops::cuda
