#include "core/box_muller.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

template <class T>
struct Draw {
  NormalValues values;
  T* out;
  uint32_t cols;

  struct Values {};
  __device__ void read(int64_t, Values&) const {}
  __device__ void write(int64_t i, const Values&) const {
    const int64_t row = quotient(i, cols);
    const int64_t index = values.index.at(row, i - row * cols);
    const RadiusAndCosine point = box_muller(values.random.block(static_cast<uint64_t>(index)));
    const double value = values.mean + values.std * (sqrt(point.squared_radius) * point.cosine);
    store(out[i], values.zeros.contains(index) ? 0.0f : static_cast<float>(value));
  }
};

}  // namespace

void random_normal(const Stream& stream, const NormalValues& values, const Tensor& out) {
  INVAR_CHECK(out.dim(1) <= UINT32_MAX, "random_normal: {} columns", out.dim(1));
  visit_float("random_normal", out.dtype(), [&]<class T>(std::type_identity<T>) {
    const Draw<Element<T>> draw{values, elements<T>(out), static_cast<uint32_t>(out.dim(1))};
    run_elementwise(stream, "random_normal", out.numel(), draw);
  });
}

}  // namespace invar::ops::cuda
