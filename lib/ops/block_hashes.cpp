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

}  // namespace

void add_block_hashes(const Stream& stream, const Tensor& values, const LogicalIndex& index, const Tensor& blocks) {
  constexpr auto kOp = "add_block_hashes";
  expect(kOp, "values", values, DType::kF32, {values.dim(0), values.dim(1)});
  expect(kOp, "blocks", blocks, DType::kI64, {blocks.dim(0)});
  if (values.empty()) return;
  const int64_t rows = values.dim(0), cols = values.dim(1), width = index.block;
  INVAR_CHECK(width > 0 && index.row_stride == width && cols % width == 0,
              "{}: blocks of {} of {} columns, {} from row to row", kOp, width, cols, index.row_stride);
  INVAR_CHECK(width == cols || index.block_stride >= rows * width, "{}: {} rows of {}, {} from block to block", kOp,
              rows, width, index.block_stride);
  const int64_t last = index.at(rows - 1, cols - 1);
  INVAR_CHECK(index.first >= 0 && last < blocks.dim(0) * kHashBlock, "{}: elements {} to {}, {} blocks", kOp,
              index.first, last, blocks.dim(0));
  if (!has_work(kOp, stream, {&values, &blocks})) return;
  if (on_cuda(stream)) return cuda::add_block_hashes(stream, values, index, blocks);
  const auto* const from = values.data<float>();
  auto* const sums = blocks.data<int64_t>();
  if (width == cols) {
    cpu::parallel_for(stream.threads(), values.numel(), kWork, [&](Range part) {
      add_segment({index.first + part.begin, index.first + part.end}, sums,
                  [own = from + part.begin](int64_t i) { return own[i]; });
    });
    return;
  }
  cpu::parallel_for(stream.threads(), cols / width, rows * width * kWork, [&](Range column_blocks) {
    for (int64_t block = column_blocks.begin; block < column_blocks.end; ++block) {
      const auto* const own = from + block * width;
      const int64_t begin = index.at(0, block * width);
      const Range segment{begin, begin + rows * width};
      if (width == 1) {  // the common case, without divisions
        add_segment(segment, sums, [=](int64_t i) { return own[i * cols]; });
      } else {
        add_segment(segment, sums, [=](int64_t i) { return own[i / width * cols + i % width]; });
      }
    }
  });
}

}  // namespace invar::ops
