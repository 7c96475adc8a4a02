#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "core/tensor.h"

// What kernels share: elements in storage read and written as float, and sums in a fixed order.
namespace invar::ops::cuda {

// BF16 as kernels see it.
template <class T>
using Element = std::conditional_t<std::is_same_v<T, BF16>, __nv_bfloat16, T>;

// The elements of a tensor of T; null if it is undefined.
template <class T>
Element<T>* elements(const Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<Element<T>*>(tensor.data<T>()) : nullptr;
}

// Elements of a 16-byte access.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

inline bool is_aligned(std::initializer_list<const void*> pointers, int64_t bytes = 16) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) != 0) return false;
  }
  return true;
}

// Error{kFault} otherwise: for kernels whose order of sums, which may not depend on where a tensor lies, wants packs.
inline void expect_aligned(std::string_view op, std::initializer_list<const void*> pointers, int64_t bytes = 16) {
  INVAR_CHECK(is_aligned(pointers, bytes), "{}: an operand is not aligned to {} bytes", op, bytes);
}

__device__ inline float load(float element) {
  return element;
}
__device__ inline float load(__nv_bfloat16 element) {
  return __bfloat162float(element);
}
__device__ inline void store(float& element, float value) {
  element = value;
}
__device__ inline void store(__nv_bfloat16& element, float value) {
  element = __float2bfloat16_rn(value);
}

// N neighbours, a power of two, moved with accesses of up to 16 bytes and kept as they are in storage.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  __device__ float operator[](int i) const { return load(element[i]); }

  T element[N];
};
// Two to a register.
template <int N>
requires(N > 1) struct alignas(2 * N < 16 ? 2 * N : 16) Pack<__nv_bfloat16, N> {
  __device__ float operator[](int i) const {
    return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
  }

  uint32_t word[N / 2];
};

template <class T, int N>
__device__ Pack<T, N> make_pack(const float (&values)[N]) {
  Pack<T, N> pack;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
      pack.word[i / 2] = reinterpret_cast<const uint32_t&>(pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) store(pack.element[i], values[i]);
  }
  return pack;
}

template <int N, class T>
__device__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <class T, int N>
__device__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}
template <int N, class T>
__device__ void store_pack(T* to, const float (&values)[N]) {
  store_pack(to, make_pack<T>(values));
}

// Hides where the bits come from: floats made of a pack before this are made again after it, not kept beside it, which
// halves the registers of a row of bf16.
template <class T, int N>
__device__ void forget_floats(Pack<T, N>& pack) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
#pragma unroll
    for (uint32_t& word : pack.word) asm volatile("" : "+r"(word));
  }
}

// a / b for a >= 0; a 32-bit division where that is enough.
__device__ inline int64_t quotient(int64_t a, uint32_t b) {
  return a <= UINT32_MAX ? static_cast<int64_t>(static_cast<uint32_t>(a) / b) : a / b;
}

// (mean(x²) + eps)^(-1/2) from the sum of squares of `width` elements.
__device__ inline float reciprocal_rms(float squares, int width, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
}

// The sum over groups of kLanes neighbouring lanes, a power of two; every lane of a group gets the same bits. All lanes
// of the warp call it.
template <int kLanes = 32, class T>
__device__ T lane_sum(T value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// The sum over threadIdx.x, whose number is a multiple of 32, for each threadIdx.y. All threads of the block call it;
// `scratch` is shared, one value per warp, and not the one of the call before.
template <class T>
__device__ T row_sum(T value, T* scratch) {
  value = lane_sum(value);
  if (blockDim.x == 32) return value;
  const unsigned warps = blockDim.x / 32;
  scratch += threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T total = 0;
  for (unsigned warp = 0; warp < warps; ++warp) total += scratch[warp];
  return total;
}

}  // namespace invar::ops::cuda
