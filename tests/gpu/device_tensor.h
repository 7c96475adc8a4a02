#pragma once

#include "device/arena.h"
#include "device/device.h"
#include "host_tensor.h"

namespace invar::test {

// The stream of this process's tests on GPU 0.
inline const Stream& gpu() {
  static const Stream stream = make_cuda_stream(0);
  return stream;
}

// A copy of a host tensor on the GPU; without values filled with NaN, as the host one.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor& host)
      : arena_("test", DeviceType::kCuda, host.bytes() + Arena::kAlignment),
        view_(shaped(arena_.allocate("tensor", host.dtype(), {host.numel()}), host)) {
    copy_across(gpu(), host, view_);
  }
  explicit DeviceTensor(const HostTensor& host) : DeviceTensor(host.tensor()) {}

  operator const Tensor&() const { return view_; }
  const Tensor& tensor() const { return view_; }

  HostTensor host() const {
    HostTensor out(view_.dtype(), {view_.shape().begin(), view_.shape().end()});
    copy_across(gpu(), view_, out);
    return out;
  }

 private:
  static Tensor shaped(const Tensor& flat, const Tensor& like) {
    return Tensor(flat.raw(), like.dtype(), DeviceType::kCuda, like.shape());
  }

  Arena arena_;
  Tensor view_;
};

// ‖actual − expected‖ / ‖expected‖; infinite if anything is not a number.
inline double relative_norm(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return error == 0 ? 0 : std::sqrt(error / size);
}

}  // namespace invar::test
