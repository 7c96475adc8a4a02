#include "ops/block_hashes.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {
namespace {

constexpr int64_t kWork = 4;  // of an element, in those of a copy

// `elements` of the logical tensor, value(i) being the i-th of them.
template <class Value>
void add_segment(Range elements, int64_t* blocks, Value value) {
  for (int64_t at = elements.begin; at < elements.end;) {
    const int64_t block = at / kHashBlock;
    const int64_t end = std::min(elements.end, (block + 1) * kHashBlock);
    uint64_t sum = 0;
    for (; at < end; ++at) {
      sum += hash_term(at, std::bit_cast<uint32_t>(value(at - elements.begin)));
    }
    // Threads share the blocks at the ends of their segments.
    std::atomic_ref(blocks[block]).fetch_add(static_cast<int64_t>(sum), std::memory_order_relaxed);
  }
}

// as_float: an element as the fp32 that is hashed.
template <class T, class AsFloat>
void add_rows(int threads, const T* values, int64_t cols, const HashedRows& run, int64_t* blocks, AsFloat as_float) {
  const int64_t rows = run.rows.size(), width = run.index.block;
  const T* const from = values + run.rows.begin * cols;
  if (width == cols) {
    cpu::parallel_for(threads, rows * cols, kWork, [&](Range part) {
      add_segment({run.index.first + part.begin, run.index.first + part.end}, blocks,
                  [=, own = from + part.begin](int64_t i) { return as_float(own[i]); });
    });
    return;
  }
  cpu::parallel_for(threads, cols / width, rows * width * kWork, [&](Range column_blocks) {
    for (int64_t block = column_blocks.begin; block < column_blocks.end; ++block) {
      const auto* const own = from + block * width;
      const int64_t begin = run.index.at(0, block * width);
      const Range segment{begin, begin + rows * width};
      if (width == 1) {  // the common case, without divisions
        add_segment(segment, blocks, [=](int64_t i) { return as_float(own[i * cols]); });
      } else {
        add_segment(segment, blocks, [=](int64_t i) { return as_float(own[i / width * cols + i % width]); });
      }
    }
  });
}

void check_run(std::string_view op, const Tensor& values, const HashedRows& run, int64_t blocks) {
  const int64_t rows = run.rows.size(), cols = values.dim(1), width = run.index.block;
  INVAR_CHECK(run.rows.begin >= 0 && rows > 0 && run.rows.end <= values.dim(0), "{}: rows {} to {} of {}", op,
              run.rows.begin, run.rows.end, values.dim(0));
  INVAR_CHECK(width > 0 && run.index.row_stride == width && cols % width == 0,
              "{}: blocks of {} of {} columns, {} from row to row", op, width, cols, run.index.row_stride);
  INVAR_CHECK(width == cols || run.index.block_stride >= rows * width, "{}: {} rows of {}, {} from block to block", op,
              rows, width, run.index.block_stride);
  const int64_t last = run.index.at(rows - 1, cols - 1);
  INVAR_CHECK(run.index.first >= 0 && last < blocks * kHashBlock, "{}: elements {} to {}, {} blocks", op,
              run.index.first, last, blocks);
}

}  // namespace

void add_block_hashes(const Stream& stream, const Tensor& values, std::span<const HashedRows> runs,
                      const Tensor& blocks, DType rounded) {
  constexpr auto kOp = "add_block_hashes";
  const bool working_copy = values.dtype() == DType::kBF16;
  expect(kOp, "values", values, working_copy ? DType::kBF16 : DType::kF32, {values.dim(0), values.dim(1)});
  expect(kOp, "blocks", blocks, DType::kI64, {blocks.dim(0)});
  for (const HashedRows& run : runs) check_run(kOp, values, run, blocks.dim(0));
  if (!has_work(kOp, stream, {&values, &blocks}) || values.empty()) return;
  if (on_cuda(stream)) return cuda::add_block_hashes(stream, values, runs, blocks, rounded);
  for (const HashedRows& run : runs) {
    const auto add = [&](const auto* elements, auto as_float) {
      add_rows(stream.threads(), elements, values.dim(1), run, blocks.data<int64_t>(), as_float);
    };
    if (working_copy) {
      add(values.data<BF16>(), [](BF16 x) { return static_cast<float>(x); });
    } else if (rounded == DType::kBF16) {
      add(values.data<float>(), [](float x) { return static_cast<float>(BF16(x)); });
    } else {
      add(values.data<float>(), [](float x) { return x; });
    }
  }
}

}  // namespace invar::ops
