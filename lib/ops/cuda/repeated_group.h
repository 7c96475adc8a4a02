#pragma once

#include "core/tensor.h"
#include "device/cuda/cuda_stream.h"

// One KV group of one sample, and copies of it: what a plan of attention is proved on.
namespace invar::ops::cuda {

// Where the elements of one kind lie. A group alone has (length, width) side by side. In the memory of all samples,
// element x of a group's token lies at (sample · length + token) · token_stride + group · group_stride + x.
struct GroupPlaces {
  int64_t samples = 0;
  int64_t length = 0;
  int64_t groups = 0;
  int64_t width = 0;
  int64_t token_stride = 0;
  int64_t group_stride = 0;

  int64_t count() const { return samples * length * groups * width; }
};

// Random numbers: a sign, a significand, and an exponent of -2 to 1, plus `exponent` (-60 to 60).
void fill_group(CudaStream& stream, BF16* data, int64_t count, uint64_t seed, int exponent);

// Of elements of 16 or 32 bits: uint16_t, uint32_t.
//
// Writes the group to its places in all samples and groups.
template <class Bits>
void repeat_group(CudaStream& stream, const Bits* group, const GroupPlaces& places, Bits* all);
// Adds to *unlike, in device memory, how many elements of all samples and groups are not those of the group.
template <class Bits>
void count_unlike(CudaStream& stream, const Bits* group, const GroupPlaces& places, const Bits* all, uint64_t* unlike);

}  // namespace invar::ops::cuda
