#include "ops/random_normal.h"

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

void random_normal(const Stream& stream, const NormalValues& values, const Tensor& out) {
  constexpr auto kOp = "random_normal";
  expect_float(kOp, "out", out, 2);
  if (!has_work(kOp, stream, {&out}) || out.empty()) return;
  if (on_cuda(stream)) return cuda::random_normal(stream, values, out);
  visit_float(kOp, out.dtype(), [&]<class T>(std::type_identity<T>) {
    T* const to = out.data<T>();
    const int64_t cols = out.dim(1);
    cpu::parallel_for(stream.threads(), out.dim(0), cols, [&](Range rows) {
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          const int64_t index = values.index.at(row, col);
          const double value = values.mean + values.std * values.random.normal(static_cast<uint64_t>(index));
          cpu::store(to[row * cols + col], values.zeros.contains(index) ? 0.0f : static_cast<float>(value));
        }
      }
    });
  });
}

}  // namespace invar::ops
