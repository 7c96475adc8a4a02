#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

// The stack lies in registers: its top is stack[0], and every push and join moves the rest by one place. All threads
// take the same steps.
template <class In, class Out, int N, int kDepth>
struct TreeSum {
  using Values = Pack<float, N>;

  __device__ Values term(int t, const In* first) const {
    Values values;
    const auto loaded = load_pack<N>(first + program.rows[t] * n);
#pragma unroll
    for (int k = 0; k < N; ++k) values.element[k] = loaded[k];
    return values;
  }
  __device__ void read(int64_t i, Values& top) const {
    const int64_t element = begin + i * N;
    const int64_t outer = element < n ? 0 : element / n;  // of which there is often but one
    const In* const first = terms + (outer * (rows - 1)) * n + element;
    Values stack[kDepth];
    Values next = term(0, first);
    for (int t = 0; t < program.terms; ++t) {
#pragma unroll
      for (int d = kDepth - 1; d > 0; --d) stack[d] = stack[d - 1];
      stack[0] = next;
      if (t + 1 < program.terms) next = term(t + 1, first);  // on its way while this one is added
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
    store_pack(out + begin + i * N, top.element);
  }

  SumProgram program;
  const In* terms;
  int64_t rows, n;
  Out* out;
  int64_t begin;  // element of out
};

template <int kDepth, class In, class Out>
void run_tree_sum(const Stream& stream, const SumProgram& program, const Tensor& terms, Out* out) {
  const auto* from = elements<In>(terms);
  const int64_t rows = terms.dim(1), n = terms.dim(2);
  const bool aligned = n % kVectorWidth<float> == 0 && is_aligned({from, out});
  for_packs<kVectorWidth<float>>(aligned, terms.dim(0) * n, [&](auto width, int64_t first, int64_t count) {
    const TreeSum<Element<In>, Out, width(), kDepth> operation{program, from, rows, n, out, first};
    run_elementwise(stream, "tree_sum", count, operation);
  });
}

}  // namespace

void tree_sum(const Stream& stream, const SumProgram& program, int depth, const Tensor& terms, const Tensor& out) {
  visit_float("tree_sum", terms.dtype(), [&]<class In>(std::type_identity<In>) {
    visit_float("tree_sum", out.dtype(), [&]<class Out>(std::type_identity<Out>) {
      if (depth <= 4) {
        run_tree_sum<4, In>(stream, program, terms, elements<Out>(out));
      } else if (depth <= 8) {
        run_tree_sum<8, In>(stream, program, terms, elements<Out>(out));
      } else {
        run_tree_sum<SumProgram::kMaxDepth, In>(stream, program, terms, elements<Out>(out));
      }
    });
  });
}

}  // namespace invar::ops::cuda
