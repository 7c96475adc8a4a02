#include "ops/matmul.h"

#include "core/error.h"
#include "ops/cpu/gemm.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta) {
  expect_float("matmul", "a", a, 2);
  expect_float("matmul", "b", b, 2);
  expect_float("matmul", "c", c, 2);
  const bool ta = transpose_a == Transpose::kYes;
  const bool tb = transpose_b == Transpose::kYes;
  const int64_t m = a.dim(ta ? 1 : 0);
  const int64_t n = b.dim(tb ? 0 : 1);
  const int64_t k = a.dim(ta ? 0 : 1);
  const bool shapes_fit = b.dim(tb ? 1 : 0) == k && c.dim(0) == m && c.dim(1) == n;
  INVAR_CHECK(shapes_fit, "matmul: shapes do not fit: a is {}{}, b is {}{}, c is {}", a.describe(),
              ta ? " transposed" : "", b.describe(), tb ? " transposed" : "", c.describe());
  INVAR_CHECK(a.dtype() == b.dtype(), "matmul: a is {}, but b is {}", name_of(a.dtype()), name_of(b.dtype()));
  const bool beta_fits = beta == 0.0f || (beta == 1.0f && c.dtype() == DType::kF32);
  INVAR_CHECK(beta_fits, "matmul: beta is {} and c {}; beta is 0, or 1 with c f32", beta, name_of(c.dtype()));
  if (!has_work("matmul", stream, {&a, &b, &c})) return;
  if (on_cuda(stream)) return cuda::matmul(stream, a, transpose_a, b, transpose_b, c, beta);

  visit_float("matmul", a.dtype(), [&]<class In>(std::type_identity<In>) {
    visit_float("matmul", c.dtype(), [&]<class Out>(std::type_identity<Out>) {
      cpu::gemm(m, n, k, a.data<In>(), ta, b.data<In>(), tb, c.data<Out>(), beta == 1.0f, stream.threads());
    });
  });
}

}  // namespace invar::ops
