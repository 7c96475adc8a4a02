#include "ops/embedding.h"

#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/cuda/sum_stack.cuh"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;

// A table cut by columns into `blocks` tables of the rows `vocabulary`, `block` columns each; a plain one is one block.
struct Blocks {
  int64_t first;   // token of row 0
  int64_t rows;    // of the vocabulary
  int64_t stride;  // elements of a block of the table
  uint32_t block;
  uint32_t width;  // of a token: blocks · block

  // Row of a token, or -1 if it is on another rank.
  __device__ int64_t row(int32_t token) const {
    const int64_t row = token - first;
    return row >= 0 && row < rows ? row : -1;
  }
  // Where column c of a row lies in the table.
  __device__ int64_t at(int64_t row, uint32_t c) const {
    const uint32_t j = c / block;
    return j * stride + row * block + (c - j * block);
  }
};

Blocks plain(Range vocabulary, const Tensor& table) {
  const auto width = static_cast<uint32_t>(table.dim(1));
  return {vocabulary.begin, vocabulary.size(), table.numel(), width, width};
}
Blocks by_columns(const Tensor& table, int64_t block) {
  return {0, table.dim(1) / block, table.dim(1), static_cast<uint32_t>(block),
          static_cast<uint32_t>(table.dim(0) * block)};
}

// threadIdx.x along the packs of a row, threadIdx.y along tokens.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Blocks blocks, float scale, int64_t count, const int32_t* __restrict__ tokens,
                   const T* __restrict__ table, T* __restrict__ out) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (t >= count) return;
  const int64_t row = blocks.row(tokens[t]);
  T* y = out + t * blocks.width;
  for (uint32_t c = threadIdx.x * N; c < blocks.width; c += blockDim.x * N) {
    float values[N] = {};
    if (row >= 0) {
      const Pack<T, N> pack = load_pack<N>(table + blocks.at(row, c));
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = __fadd_rn(__fmul_rn(pack[i], scale), 0.0f);  // −0 + 0 = +0
    }
    store_pack(y + c, values);
  }
}

template <class T>
void forward(const Stream& stream, std::string_view op, const Blocks& blocks, float scale, const Tensor& tokens,
             const Tensor& table, const Tensor& out) {
  if (out.empty()) return;
  constexpr int N = kVectorWidth<Element<T>>;
  const bool aligned = blocks.block % N == 0 && is_aligned({table.raw(), out.raw()});
  const auto kernel = aligned ? forward_kernel<Element<T>, N> : forward_kernel<Element<T>, 1>;
  const int64_t packs = ceil_div(blocks.width, aligned ? N : 1);
  const auto x = static_cast<unsigned>(std::min<int64_t>(kThreads, std::bit_ceil(static_cast<uint64_t>(packs))));
  const dim3 threads(x, kThreads / x);
  const auto grid = static_cast<unsigned>(ceil_div(tokens.numel(), threads.y));
  kernel<<<grid, threads, 0, cuda_handle(stream)>>>(blocks, scale, tokens.numel(), tokens.data<int32_t>(),
                                                    elements<T>(table), elements<T>(out));
  check_launch(op);
}

// Tokens sorted by row of the table, positions ascending within a row. Those without a row of their own to add to are
// last, as row `rows`.
struct Sorted {
  const uint32_t* rows;
  const int32_t* positions;
};

__global__ void rows_kernel(Blocks blocks, int64_t frozen_token, int count, const int32_t* tokens, uint32_t* rows,
                            int32_t* positions) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (t >= count) return;
  const int64_t row = tokens[t] == frozen_token ? -1 : blocks.row(tokens[t]);
  rows[t] = static_cast<uint32_t>(row < 0 ? blocks.rows : row);
  positions[t] = t;
}

// In the stream's workspace.
Sorted sort_by_row(const Stream& stream, std::string_view op, const Blocks& blocks, int64_t frozen_token,
                   const Tensor& tokens) {
  const int count = static_cast<int>(tokens.numel());
  const int bits = std::bit_width(static_cast<uint64_t>(blocks.rows));
  INVAR_CHECK(count == tokens.numel() && bits <= 32, "{}: {} tokens, {} rows", op, tokens.numel(), blocks.rows);
  const cudaStream_t handle = cuda_handle(stream);
  size_t scratch_bytes = 0;
  const auto sort = [&](void* scratch, const uint32_t* rows, uint32_t* sorted_rows, const int32_t* positions,
                        int32_t* sorted_positions) {
    check_cuda(cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, rows, sorted_rows, positions, sorted_positions,
                                               count, 0, bits, handle),
               op);
  };
  sort(nullptr, nullptr, nullptr, nullptr, nullptr);

  const int64_t array_bytes = round_up(int64_t{4} * count, 256);
  auto* base = static_cast<std::byte*>(stream.cuda().workspace(4 * array_bytes + static_cast<int64_t>(scratch_bytes)));
  const auto array = [&](int index) { return base + index * array_bytes; };
  auto* rows = reinterpret_cast<uint32_t*>(array(0));
  auto* sorted_rows = reinterpret_cast<uint32_t*>(array(1));
  auto* positions = reinterpret_cast<int32_t*>(array(2));
  auto* sorted_positions = reinterpret_cast<int32_t*>(array(3));
  const auto grid = static_cast<unsigned>(ceil_div(count, kThreads));
  rows_kernel<<<grid, kThreads, 0, handle>>>(blocks, frozen_token, count, tokens.data<int32_t>(), rows, positions);
  check_launch(op);
  sort(array(4), rows, sorted_rows, positions, sorted_positions);
  return {sorted_rows, sorted_positions};
}

// A warp for the columns [32·N·chunk, + 32·N) of each place in the sorted order; it works if a row begins there, and
// adds that row's tokens in ascending order, sample by sample. It reads kBatch of a sample's at once, so that a token
// that is everywhere costs one latency of memory per batch, at least one per sample.
template <class T, int N, int kDepth>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Blocks blocks, float scale, uint32_t chunks, int count, Sorted sorted, const T* __restrict__ d_out,
                    const __grid_constant__ PackedSums sums) {
  constexpr int kBatch = N * sizeof(T) > 8 ? 16 : 32;
  const unsigned lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t begin = quotient(warp, chunks);
  if (begin >= count) return;
  const uint32_t row = sorted.rows[begin];
  if (row >= blocks.rows || (begin > 0 && sorted.rows[begin - 1] == row)) return;

  const uint32_t c = (static_cast<uint32_t>(warp - begin * chunks) * 32 + lane) * N;
  const bool mine = c < blocks.width;
  const int64_t element = mine ? blocks.at(row, c) : 0;  // what others read there is of no use
  const auto buffers = [&](int buffer) { return sums.buffers[buffer] + element; };
  SumStack<N, kDepth> stack;
  stack.begin(sums.places[0], buffers);
  const int length = count / sums.samples;
  int sample = 0, end = length;
  const auto next_sample = [&] {
    stack.finish(sums.places[sample], buffers);
    ++sample;
    end += length;
    if (sample < sums.samples) stack.begin(sums.places[sample], buffers);
  };
  // Lane l knows place l of a batch, and whether it is the row's: a prefix of the lanes.
  struct Place {
    bool in_row;
    int32_t position;
  };
  const auto look = [&](int64_t first) {
    if (lane >= kBatch || first + lane >= count) return Place{false, 0};
    return Place{sorted.rows[first + lane] == row, sorted.positions[first + lane]};
  };
  Place place = look(begin);
  for (int64_t first = begin;;) {
    const auto [in_row, position] = place;
    const int left = __popc(__ballot_sync(0xffffffffu, in_row));  // of the row's tokens, in this batch
    if (left == 0) break;
    while (__shfl_sync(0xffffffffu, position, 0) >= end) next_sample();
    const int found = __popc(__ballot_sync(0xffffffffu, in_row && position < end));  // of the sample's
    const bool last = found == left && left < kBatch;
    first += found;
    if (!last) place = look(first);  // on its way while these are added
    Pack<T, N> terms[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t t = __shfl_sync(0xffffffffu, position, k);
      if (k < found && mine) terms[k] = load_pack<N>(d_out + t * blocks.width + c);
    }
    Pack<float, N>& sum = stack.top();
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (k >= found) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) sum.element[i] = fmaf(scale, terms[k][i], sum[i]);
    }
    if (last) break;
  }
  while (sample < sums.samples) next_sample();
  if (mine) stack.store(buffers);
}

constexpr size_t kOtherParameters = 64;  // at most
static_assert(sizeof(Blocks) + sizeof(Sorted) + sizeof(PackedSums) + kOtherParameters <= kParameterBytes);

template <class T>
void backward(const Stream& stream, std::string_view op, const Blocks& blocks, const LookupParams& params,
              const Tensor& tokens, const Tensor& d_out, const SampleSums& sums) {
  if (d_out.empty() || sums.buffers.front().empty()) return;
  const Sorted sorted = sort_by_row(stream, op, blocks, params.frozen_token, tokens);
  constexpr int N = 4;
  bool aligned = blocks.block % N == 0 && is_aligned({d_out.raw()}, N * sizeof(T));
  for (const Tensor& buffer : sums.buffers) aligned = aligned && is_aligned({buffer.raw()});
  const auto count = static_cast<int>(tokens.numel());
  const auto chunks = static_cast<uint32_t>(ceil_div(blocks.width, 32 * (aligned ? N : 1)));
  const auto grid = static_cast<unsigned>(ceil_div(int64_t{chunks} * count, kThreads / 32));
  with_depth(sums.places, [&](auto depth) {
    const auto kernel = aligned ? backward_kernel<Element<T>, N, depth()> : backward_kernel<Element<T>, 1, depth()>;
    kernel<<<grid, kThreads, 0, cuda_handle(stream)>>>(blocks, params.scale, chunks, count, sorted, elements<T>(d_out),
                                                       PackedSums(sums.places, sums.buffers));
  });
  check_launch(op);
}

}  // namespace

void embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& table,
                       Range vocabulary, const Tensor& out) {
  constexpr auto kOp = "embedding_forward";
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    forward<T>(stream, kOp, plain(vocabulary, table), params.scale, tokens, table, out);
  });
}

void embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                        Range vocabulary, const SampleSums& sums) {
  constexpr auto kOp = "embedding_backward";
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward<T>(stream, kOp, plain(vocabulary, sums.buffers.front()), params, tokens, d_out, sums);
  });
}

void column_embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                              const Tensor& table, int64_t block, const Tensor& out) {
  constexpr auto kOp = "column_embedding_forward";
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    forward<T>(stream, kOp, by_columns(table, block), params.scale, tokens, table, out);
  });
}

void column_embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                               const Tensor& d_out, int64_t block, const SampleSums& sums) {
  constexpr auto kOp = "column_embedding_backward";
  visit_float(kOp, d_out.dtype(), [&]<class T>(std::type_identity<T>) {
    backward<T>(stream, kOp, by_columns(sums.buffers.front(), block), params, tokens, d_out, sums);
  });
}

}  // namespace invar::ops::cuda
