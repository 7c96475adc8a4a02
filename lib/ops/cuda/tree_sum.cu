#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

// The stack lies in registers: its top is stack[0], and every push and join moves the rest by one place. All threads
// take the same steps. kBatch: terms that are read before the first of them is added.
template <class In, class Out, int N, int kDepth, int kBatch>
struct TreeSum {
  using Values = Pack<float, N>;

  __device__ void read(int64_t i, Values& top) const {
    const int64_t element = begin + i * N;
    const int64_t outer = element < n ? 0 : element / n;  // of which there is often but one
    const In* const first = terms + (outer * (rows - 1)) * n + element;
    Values stack[kDepth];
    for (int begun = 0; begun < program.terms; begun += kBatch) {
      Pack<In, N> batch[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begun + b < program.terms) batch[b] = load_pack<N>(first + program.rows[begun + b] * n);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begun + b < program.terms) add(batch[b], program.joins[begun + b], stack);
      }
    }
    top = stack[0];
  }
  static __device__ void add(const Pack<In, N>& term, int joins, Values (&stack)[kDepth]) {
#pragma unroll
    for (int d = kDepth - 1; d > 0; --d) stack[d] = stack[d - 1];
#pragma unroll
    for (int k = 0; k < N; ++k) stack[0].element[k] = term[k];
    for (; joins > 0; --joins) {
#pragma unroll
      for (int k = 0; k < N; ++k) stack[0].element[k] = __fadd_rn(stack[1].element[k], stack[0].element[k]);
#pragma unroll
      for (int d = 1; d + 1 < kDepth; ++d) stack[d] = stack[d + 1];
    }
  }
  __device__ void write(int64_t i, const Values& top) const {
    store_pack(out + begin + i * N, top.element);
  }

  SumProgram program;
  const In* terms;
  int64_t rows, n;
  Out* out;
  int64_t begin;  // element of out
};

template <int kDepth, int kBatch, class In, class Out>
void run_tree_sum(const Stream& stream, const SumProgram& program, const Tensor& terms, Out* out) {
  const auto* from = elements<In>(terms);
  const int64_t rows = terms.dim(1), n = terms.dim(2);
  const bool aligned = n % kVectorWidth<float> == 0 && is_aligned({from, out});
  for_packs<kVectorWidth<float>>(aligned, terms.dim(0) * n, [&](auto width, int64_t first, int64_t count) {
    const TreeSum<Element<In>, Out, width(), kDepth, kBatch> operation{program, from, rows, n, out, first};
    run_elementwise(stream, "tree_sum", count, operation);
  });
}

}  // namespace

void tree_sum(const Stream& stream, const SumProgram& program, int depth, const Tensor& terms, const Tensor& out) {
  visit_float("tree_sum", terms.dtype(), [&]<class In>(std::type_identity<In>) {
    visit_float("tree_sum", out.dtype(), [&]<class Out>(std::type_identity<Out>) {
      auto* const to = elements<Out>(out);
      if (program.terms <= 2) return run_tree_sum<2, 2, In>(stream, program, terms, to);
      if (depth <= 4) return run_tree_sum<4, 4, In>(stream, program, terms, to);
      if (depth <= 8) return run_tree_sum<8, 4, In>(stream, program, terms, to);
      run_tree_sum<SumProgram::kMaxDepth, 4, In>(stream, program, terms, to);
    });
  });
}

}  // namespace invar::ops::cuda
