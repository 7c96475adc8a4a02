#include "ops/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <utility>

#include "core/error.h"
#include "core/integer.h"
#include "core/range.h"
#include "ops/cpu/gemm_kernel.h"
#include "ops/cpu/gemm_pack.h"
#include "ops/cpu/threads.h"

// Blocking. Threads own disjoint rectangles of c. A thread walks its rectangle in tiles of at most
// kTileRows x kTileCols, and for each tile over k in blocks of at most kDepth: the block of op(b) is packed once,
// blocks of kBlockRows rows of op(a) are packed to stay in the second-level cache, and the kernel runs over register
// tiles. Between blocks of k the running sums of the tile wait in fp32, so that the chain of an element is never cut.

namespace invar::ops::cpu {
namespace {

constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRows = 192;
constexpr int64_t kTileRows = 768;
constexpr int64_t kTileCols = 1024;
constexpr int64_t kMinThreadProducts = 1 << 18;  // multiply-adds; less is not worth waking a thread
constexpr int64_t kPackingWeight = 16;           // packing one element costs about as much as 16 multiply-adds
constexpr int64_t kLineFloats = 16;              // buffers start at cache lines: kernels load whole vectors

// Part `index` of a range cut into `parts` nearly equal parts at multiples of `unit`.
Range nth_part(Range whole, int64_t unit, int64_t parts, int64_t index) {
  const int64_t units = ceil_div(whole.size(), unit);
  return {whole.begin + std::min(whole.size(), units * index / parts * unit),
          whole.begin + std::min(whole.size(), units * (index + 1) / parts * unit)};
}

// The number of parts that keeps each of them at or below `limit`.
int64_t parts_for(Range whole, int64_t unit, int64_t limit) {
  return std::max<int64_t>(1, ceil_div(ceil_div(whole.size(), unit), limit / unit));
}

template <class In, class Out>
struct Product {
  int64_t m, n, k;
  PackSource<In> a, b;
  Out* c;
  bool accumulate;
};

// How threads share c: a grid of rows x cols rectangles.
struct Grid {
  int64_t rows = 1;
  int64_t cols = 1;
};

// Packing buffers of a calling thread, kept for its next call. Grows to at most 5 MiB for each thread of the product.
class Workspace {
 public:
  float* reserve(int64_t floats) {
    if (floats > size_) {
      size_ = 0;
      buffer_.reset();
      const auto bytes = static_cast<size_t>(round_up(floats, kLineFloats)) * sizeof(float);
      buffer_.reset(static_cast<float*>(std::aligned_alloc(kLineFloats * sizeof(float), bytes)));
      if (!buffer_) throw Error(ErrorKind::kFault, format("no memory for {} bytes of matrix packing buffers", bytes));
      size_ = floats;
    }
    return buffer_.get();
  }

 private:
  struct Free {
    void operator()(float* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<float[], Free> buffer_;
  int64_t size_ = 0;
};

// The driver for one kernel.
template <class Kernel, class In, class Out>
class Gemm {
 public:
  Gemm(const Product<In, Out>& product, int threads) : p_(product), grid_(choose_grid(threads)) {
    const int64_t tile_rows = std::min(largest_rows(grid_), kTileRows);
    const int64_t tile_cols = std::min(largest_cols(grid_), kTileCols);
    const int64_t depth = std::min(p_.k, kDepth);
    a_floats_ = round_up(std::min(tile_rows, kBlockRows) * depth, kLineFloats);
    b_floats_ = round_up(tile_cols * depth, kLineFloats);
    sum_floats_ = round_up(p_.k > kDepth ? tile_rows * tile_cols : kRows * kCols, kLineFloats);
  }

  void run(Workspace& workspace) const {
    const int threads = static_cast<int>(grid_.rows * grid_.cols);
    const int64_t floats = a_floats_ + b_floats_ + sum_floats_;
    float* buffer = workspace.reserve(floats * threads);
    if (threads == 1) {
      run_rectangle({0, p_.m}, {0, p_.n}, buffer);
      return;
    }
    run_on_threads(threads, [&](int64_t thread) {
      run_rectangle(nth_part({0, p_.m}, kRows, grid_.rows, thread / grid_.cols),
                    nth_part({0, p_.n}, kCols, grid_.cols, thread % grid_.cols), buffer + thread * floats);
    });
  }

 private:
  static constexpr int64_t kRows = Kernel::kRows;
  static constexpr int64_t kCols = Kernel::kCols;
  using KernelFunction = void (*)(int64_t, const float*, const float*, float*, bool);

  template <int... Index>
  static constexpr std::array<KernelFunction, Kernel::kRows> kernels(std::integer_sequence<int, Index...>) {
    return {&Kernel::template run<Index + 1>...};
  }
  // By the number of rows less one.
  static constexpr auto kKernels = kernels(std::make_integer_sequence<int, Kernel::kRows>());

  // The size of the largest rectangle of a grid, in whole register tiles.
  int64_t largest_rows(Grid grid) const { return round_up(ceil_div(p_.m, grid.rows), kRows); }
  int64_t largest_cols(Grid grid) const { return round_up(ceil_div(p_.n, grid.cols), kCols); }

  // The grid of least time: the multiply-adds of the largest rectangle, and the packing of its operands.
  Grid choose_grid(int threads) const {
    const int64_t useful = std::clamp<int64_t>(p_.m * p_.n * p_.k / kMinThreadProducts, 1, std::max(1, threads));
    const auto cost = [&](Grid grid) {
      const int64_t rows = largest_rows(grid);
      const int64_t cols = largest_cols(grid);
      return rows * cols + kPackingWeight * (rows + cols);
    };
    Grid best;
    for (int64_t rows = 1; rows <= useful; ++rows) {
      const Grid grid{rows, useful / rows};
      if (cost(grid) < cost(best)) best = grid;
    }
    return best;
  }

  void run_rectangle(Range rows, Range cols, float* buffer) const {
    const int64_t row_tiles = parts_for(rows, kRows, kTileRows);
    const int64_t col_tiles = parts_for(cols, kCols, kTileCols);
    for (int64_t i = 0; i < row_tiles; ++i) {
      for (int64_t j = 0; j < col_tiles; ++j) {
        run_tile(nth_part(rows, kRows, row_tiles, i), nth_part(cols, kCols, col_tiles, j), buffer);
      }
    }
  }

  void run_tile(Range rows, Range cols, float* buffer) const {
    float* packed_a = buffer;
    float* packed_b = buffer + a_floats_;
    float* sums = packed_b + b_floats_;
    const int64_t depth_blocks = parts_for({0, p_.k}, 1, kDepth);
    const int64_t row_blocks = parts_for(rows, kRows, kBlockRows);
    for (int64_t block = 0; block < depth_blocks; ++block) {
      const Range ks = nth_part({0, p_.k}, 1, depth_blocks, block);
      pack_panels<kCols>(p_.b, cols, ks, packed_b);
      for (int64_t i = 0; i < row_blocks; ++i) {
        const Range block_rows = nth_part(rows, kRows, row_blocks, i);
        pack_panels<kRows>(p_.a, block_rows, ks, packed_a);
        const int64_t row_stride = depth_blocks > 1 ? round_up(cols.size(), kCols) : 0;
        run_block(block_rows, cols, ks, packed_a, packed_b, sums + (block_rows.begin - rows.begin) * row_stride);
      }
    }
  }

  // All register tiles of a block. With one block of k they share one place for their sums, else each has its own.
  void run_block(Range rows, Range cols, Range ks, const float* packed_a, const float* packed_b, float* sums) const {
    const int64_t sum_step = p_.k > kDepth ? kRows * kCols : 0;
    const float* b = packed_b;
    for (int64_t col = cols.begin; col < cols.end; col += kCols, b += kCols * ks.size()) {
      const float* a = packed_a;
      for (int64_t row = rows.begin; row < rows.end; row += kRows, a += kRows * ks.size(), sums += sum_step) {
        const int64_t tile_rows = std::min(kRows, rows.end - row);
        kKernels[static_cast<size_t>(tile_rows - 1)](ks.size(), a, b, sums, ks.begin > 0);
        if (ks.end == p_.k) store_tile(sums, row, tile_rows, col, std::min(kCols, cols.end - col));
      }
    }
  }

  void store_tile(const float* sums, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    for (int64_t i = 0; i < rows; ++i, sums += kCols) {
      Out* c = p_.c + (row + i) * p_.n + col;
      if (p_.accumulate) {
        for (int64_t j = 0; j < cols; ++j) c[j] = static_cast<Out>(sums[j] + static_cast<float>(c[j]));
      } else {
        for (int64_t j = 0; j < cols; ++j) c[j] = static_cast<Out>(sums[j]);
      }
    }
  }

  Product<In, Out> p_;
  Grid grid_;
  int64_t a_floats_ = 0;
  int64_t b_floats_ = 0;
  int64_t sum_floats_ = 0;
};

Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

template <class Kernel, class In, class Out>
void run_with(const Product<In, Out>& product, int threads) {
  Gemm<Kernel, In, Out>(product, threads).run(thread_workspace());
}

}  // namespace

std::string_view name_of(GemmIsa isa) {
  switch (isa) {
    case GemmIsa::kPortable:
      return "portable";
    case GemmIsa::kAvx2:
      return "avx2";
    case GemmIsa::kAvx512:
      return "avx512";
  }
  return "?";
}

bool is_supported(GemmIsa isa) {
  if (isa == GemmIsa::kPortable) return true;
#if defined(__x86_64__)
  if (isa == GemmIsa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == GemmIsa::kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return false;
}

GemmIsa best_gemm_isa() {
  if (is_supported(GemmIsa::kAvx512)) return GemmIsa::kAvx512;
  if (is_supported(GemmIsa::kAvx2)) return GemmIsa::kAvx2;
  return GemmIsa::kPortable;
}

template <class In, class Out>
void gemm(int64_t m, int64_t n, int64_t k, const In* a, int64_t a_stride, bool transpose_a, const In* b,
          bool transpose_b, Out* c, bool accumulate, int threads, GemmIsa isa) {
  INVAR_CHECK(is_supported(isa), "this processor does not run the {} matrix product", name_of(isa));
  if (m == 0 || n == 0) return;
  const Product<In, Out> product{m, n,         k, {a, a_stride, transpose_a}, {b, transpose_b ? k : n, !transpose_b},
                                 c, accumulate};
  switch (isa) {
    case GemmIsa::kPortable:
      return run_with<PortableKernel>(product, threads);
#if defined(__x86_64__)
    case GemmIsa::kAvx2:
      return run_with<Avx2Kernel>(product, threads);
    case GemmIsa::kAvx512:
      return run_with<Avx512Kernel>(product, threads);
#else
    default:
      return;
#endif
  }
}

#define INVAR_GEMM(In, Out) \
  template void gemm(int64_t, int64_t, int64_t, const In*, int64_t, bool, const In*, bool, Out*, bool, int, GemmIsa)
INVAR_GEMM(float, float);
INVAR_GEMM(float, BF16);
INVAR_GEMM(BF16, float);
INVAR_GEMM(BF16, BF16);
#undef INVAR_GEMM

}  // namespace invar::ops::cpu
