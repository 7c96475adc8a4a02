#include "observe/state_hash.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "core/format.h"
#include "core/philox.h"
#include "parallel/parameter.h"

namespace invar {
namespace {

constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;  // so that 0 is not a fixed point
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Elements [first, first + count) of a logical tensor, inside one block. value(i) is the i-th of them.
template <class Value>
void add_inside_block(int64_t first, int64_t count, std::span<uint64_t> blocks, Value value) {
  const auto place = static_cast<uint64_t>(first % kHashBlock);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += mix(((place + static_cast<uint64_t>(i)) << 32) | std::bit_cast<uint32_t>(value(i)));
  }
  // Threads share the blocks at the ends of their segments.
  std::atomic_ref(blocks[static_cast<size_t>(first / kHashBlock)]).fetch_add(sum, std::memory_order_relaxed);
}

// Calls visit(begin, count) for the parts of [begin, end) that lie in one block each.
template <class Visit>
void for_each_block(int64_t begin, int64_t end, Visit visit) {
  while (begin < end) {
    const int64_t count = std::min(end, (begin / kHashBlock + 1) * kHashBlock) - begin;
    visit(begin, count);
    begin += count;
  }
}

// A row of storage is a block of columns: of every logical row it holds a segment.
void add_transposed(const Parameter& parameter, Range rows, const float* stored, std::span<uint64_t> blocks,
                    [[maybe_unused]] int threads) {
  const int64_t width = parameter.column_block, cols = parameter.cols();
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < parameter.shape[0]; ++row) {
    const int64_t begin = parameter.logical_index(rows.begin, row * width);
    for_each_block(begin, begin + rows.size() * width, [&](int64_t first, int64_t count) {
      add_inside_block(first, count, blocks, [&](int64_t i) {
        const int64_t at = first - begin + i;
        if (width == 1) return stored[at * cols + row];  // the common case, without divisions
        return stored[at / width * cols + row * width + at % width];
      });
    });
  }
}

}  // namespace

void add_to_blocks(const Parameter& parameter, Range rows, std::span<const float> stored, std::span<uint64_t> blocks,
                   int threads) {
  const int64_t cols = parameter.cols();
  INVAR_CHECK(std::ssize(stored) == rows.size() * cols && std::ssize(blocks) == hash_blocks(parameter.numel()),
              "'{}': {} elements of {} rows, {} blocks", parameter.name, stored.size(), rows.size(), blocks.size());
  if (parameter.transposed) return add_transposed(parameter, rows, stored.data(), blocks, threads);
  const int64_t begin = rows.begin * cols, end = rows.end * cols;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t block = begin / kHashBlock; block < hash_blocks(end); ++block) {
    const int64_t first = std::max(begin, block * kHashBlock);
    const float* const values = stored.data() + (first - begin);
    add_inside_block(first, std::min(end, (block + 1) * kHashBlock) - first, blocks,
                     [=](int64_t i) { return values[i]; });
  }
}

uint64_t hash_tensor(std::span<const uint64_t> blocks) {
  uint64_t sum = 0;
  for (size_t i = 0; i < blocks.size(); ++i) sum += mix(mix(i) + blocks[i]);
  return sum;
}

StateDigest StateHash::digest(double loss, double grad_norm) const {
  StateDigest digest;
  const auto append = [&](uint64_t word) { digest.combined = mix(mix(digest.combined) + word); };
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    uint64_t sum = 0;
    for (const TensorHash& tensor : tensors[kind]) sum += mix(mix(hash_name(tensor.name)) + tensor.hash());
    digest.kinds[kind] = mix(sum);
    append(digest.kinds[kind]);
  }
  append(std::bit_cast<uint64_t>(loss));
  append(std::bit_cast<uint64_t>(grad_norm));
  return digest;
}

std::string hash_text(uint64_t hash) {
  return format("{:016x}", hash);
}

}  // namespace invar
