#pragma once

// Packing of one operand of the CPU matrix product, widened to float, into the panels that the kernels read.
//
// Both operands are seen alike, as a matrix over (x, k): x is a row of op(a) or a column of op(b). A panel holds Width
// consecutive x as (depth, Width), and panels follow each other. The last one is filled up with zeros.

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/range.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace invar::ops::cpu {

template <class T>
struct PackSource {
  const T* data;
  int64_t stride;
  bool x_contiguous;  // element (x, k) is data[k * stride + x]; otherwise data[x * stride + k]

  const T* at(int64_t x, int64_t k) const { return data + (x_contiguous ? k * stride + x : x * stride + k); }
};

// A 4 by 4 block: target[k * target_stride + x] = source[x * source_stride + k].
#if defined(__SSE2__)

inline __m128 load_4(const float* source) {
  return _mm_loadu_ps(source);
}

inline __m128 load_4(const BF16* source) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
}

template <class T>
void transpose_4x4(const T* source, int64_t source_stride, float* target, int64_t target_stride) {
  __m128 row[4];
  for (int x = 0; x < 4; ++x) row[x] = load_4(source + x * source_stride);
  _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
  for (int k = 0; k < 4; ++k) _mm_storeu_ps(target + k * target_stride, row[k]);
}

#else

template <class T>
void transpose_4x4(const T* source, int64_t source_stride, float* target, int64_t target_stride) {
  for (int x = 0; x < 4; ++x) {
    for (int k = 0; k < 4; ++k) target[k * target_stride + x] = static_cast<float>(source[x * source_stride + k]);
  }
}

#endif

// One panel of `width` <= Width columns whose elements are contiguous along k.
template <int Width, class T>
void pack_transposed_panel(const T* source, int64_t stride, int64_t width, int64_t depth, float* panel) {
  const int64_t blocked = width == Width ? depth / 4 * 4 : 0;
  for (int64_t first = 0; first < Width; first += 4) {
    const int64_t x = std::min<int64_t>(first, Width - 4);  // the last block may overlap the one before it
    for (int64_t k = 0; k < blocked; k += 4)
      transpose_4x4(source + x * stride + k, stride, panel + k * Width + x, Width);
  }
  for (int64_t x = 0; x < width; ++x) {
    for (int64_t k = blocked; k < depth; ++k) panel[k * Width + x] = static_cast<float>(source[x * stride + k]);
  }
  for (int64_t k = 0; k < depth; ++k) std::fill(panel + k * Width + width, panel + (k + 1) * Width, 0.0f);
}

// One panel of `width` <= Width columns whose elements are contiguous along x.
template <int Width, class T>
void pack_straight_panel(const T* source, int64_t stride, int64_t width, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; ++k, source += stride, panel += Width) {
    if (width == Width) {
      for (int x = 0; x < Width; ++x) panel[x] = static_cast<float>(source[x]);
    } else {
      for (int64_t x = 0; x < width; ++x) panel[x] = static_cast<float>(source[x]);
      std::fill(panel + width, panel + Width, 0.0f);
    }
  }
}

template <int Width, class T>
void pack_panels(const PackSource<T>& source, Range xs, Range ks, float* panels) {
  for (int64_t x = xs.begin; x < xs.end; x += Width, panels += Width * ks.size()) {
    const int64_t width = std::min<int64_t>(Width, xs.end - x);
    const T* first = source.at(x, ks.begin);
    if (source.x_contiguous) {
      pack_straight_panel<Width>(first, source.stride, width, ks.size(), panels);
    } else {
      pack_transposed_panel<Width>(first, source.stride, width, ks.size(), panels);
    }
  }
}

}  // namespace invar::ops::cpu
