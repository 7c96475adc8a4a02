#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

// The stack lies in registers: its top is stack[0], and every push and join moves the rest by one place. All threads
// take the same steps.
template <class Out, int N, int kDepth>
struct TreeSum {
  using Values = Pack<float, N>;

  __device__ Pack<float, N> term(int t, int64_t i) const {
    return load_pack<N>(terms + program.rows[t] * stride + i * N);
  }
  __device__ void read(int64_t i, Values& top) const {
    Pack<float, N> stack[kDepth];
    Pack<float, N> next = term(0, i);
    for (int t = 0; t < program.terms; ++t) {
#pragma unroll
      for (int d = kDepth - 1; d > 0; --d) stack[d] = stack[d - 1];
      stack[0] = next;
      if (t + 1 < program.terms) next = term(t + 1, i);  // on its way while this one is added
      for (int joins = program.joins[t]; joins > 0; --joins) {
#pragma unroll
        for (int k = 0; k < N; ++k) stack[0].element[k] = __fadd_rn(stack[1].element[k], stack[0].element[k]);
#pragma unroll
        for (int d = 1; d + 1 < kDepth; ++d) stack[d] = stack[d + 1];
      }
    }
    top = stack[0];
  }
  __device__ void write(int64_t i, const Values& top) const {
    store_pack(out + i * N, top.element);
  }

  SumProgram program;
  const float* terms;
  int64_t stride;
  Out* out;
};

template <int kDepth, class Out>
void run_tree_sum(const Stream& stream, const SumProgram& program, const Tensor& terms, Out* out) {
  const float* from = elements<float>(terms);
  const int64_t n = terms.dim(1);
  const bool aligned = n % kVectorWidth<float> == 0 && is_aligned({from, out});
  for_packs<kVectorWidth<float>>(aligned, n, [&](auto width, int64_t first, int64_t count) {
    const TreeSum<Out, width(), kDepth> operation{program, from + first, n, out + first};
    run_elementwise(stream, "tree_sum", count, operation);
  });
}

}  // namespace

void tree_sum(const Stream& stream, const SumProgram& program, int depth, const Tensor& terms, const Tensor& out) {
  visit_float("tree_sum", out.dtype(), [&]<class Out>(std::type_identity<Out>) {
    if (depth <= 4) {
      run_tree_sum<4>(stream, program, terms, elements<Out>(out));
    } else if (depth <= 8) {
      run_tree_sum<8>(stream, program, terms, elements<Out>(out));
    } else {
      run_tree_sum<SumProgram::kMaxDepth>(stream, program, terms, elements<Out>(out));
    }
  });
}

}  // namespace invar::ops::cuda
