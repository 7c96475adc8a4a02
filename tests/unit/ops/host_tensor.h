#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device/stream.h"
#include "support/catch.h"
#include "support/errors.h"

namespace invar::test {

using Values = std::vector<double>;

inline const Stream kCpu(DeviceType::kCpu);
inline const Stream kTwoThreads(DeviceType::kCpu, 2);
inline const Stream kMeta(DeviceType::kMeta);

// A tensor that owns its bytes. Without values it is filled with NaN, so that an element nobody wrote shows.
class HostTensor {
 public:
  HostTensor(DType dtype, const std::vector<int64_t>& shape) : view_(nullptr, dtype, DeviceType::kCpu, shape) {
    bytes_.assign(static_cast<size_t>(view_.bytes()), std::byte{0xff});
    view_ = Tensor(bytes_.data(), dtype, DeviceType::kCpu, shape);
  }
  HostTensor(DType dtype, const std::vector<int64_t>& shape, const std::vector<double>& values)
      : HostTensor(dtype, shape) {
    REQUIRE(view_.numel() == static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  HostTensor(const HostTensor& other) : HostTensor(other.view_.dtype(), shape_of(other.view_)) {
    bytes_ = other.bytes_;
    view_ = Tensor(bytes_.data(), view_.dtype(), view_.device(), view_.shape());
  }
  HostTensor& operator=(const HostTensor&) = delete;

  operator const Tensor&() const { return view_; }
  const Tensor& tensor() const { return view_; }
  Tensor on(DeviceType device) const { return Tensor(nullptr, view_.dtype(), device, view_.shape()); }
  size_t size() const { return static_cast<size_t>(view_.numel()); }

  double operator[](size_t i) const {
    switch (view_.dtype()) {
      case DType::kF32:
        return static_cast<double>(view_.data<float>()[i]);
      case DType::kBF16:
        return static_cast<double>(static_cast<float>(view_.data<BF16>()[i]));
      case DType::kI32:
        return static_cast<double>(view_.data<int32_t>()[i]);
      default:
        throw std::logic_error("HostTensor: dtype");
    }
  }
  void set(size_t i, double value) {
    switch (view_.dtype()) {
      case DType::kF32:
        view_.data<float>()[i] = static_cast<float>(value);
        break;
      case DType::kBF16:
        view_.data<BF16>()[i] = BF16(static_cast<float>(value));
        break;
      case DType::kI32:
        view_.data<int32_t>()[i] = static_cast<int32_t>(value);
        break;
      default:
        throw std::logic_error("HostTensor: dtype");
    }
  }
  std::vector<double> values() const {
    std::vector<double> out(size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = (*this)[i];
    return out;
  }
  bool same_bits(const HostTensor& other) const { return bytes_ == other.bytes_; }

 private:
  static std::vector<int64_t> shape_of(const Tensor& t) { return {t.shape().begin(), t.shape().end()}; }

  std::vector<std::byte> bytes_;
  Tensor view_;
};

// Uniform in (-scale, scale) around `centre`.
inline std::vector<double> random_values(int64_t n, unsigned seed, double scale = 1.0, double centre = 0.0) {
  std::mt19937 generator(seed);
  std::vector<double> out(static_cast<size_t>(n));
  for (double& value : out) value = centre + scale * (std::ldexp(static_cast<double>(generator()), -31) - 1.0);
  return out;
}

inline HostTensor random_tensor(DType dtype, const std::vector<int64_t>& shape, unsigned seed, double scale = 1.0,
                                double centre = 0.0) {
  return HostTensor(dtype, shape,
                    random_values(Tensor(nullptr, dtype, DeviceType::kMeta, shape).numel(), seed, scale, centre));
}

// |actual - expected| <= relative * |expected| + absolute, element by element.
inline void require_close(const std::vector<double>& actual, const std::vector<double>& expected, double relative,
                          double absolute) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]);
    if (error <= relative * std::abs(expected[i]) + absolute) continue;
    INFO("element " << i << " is " << actual[i] << ", expected " << expected[i]);
    REQUIRE(error <= relative * std::abs(expected[i]) + absolute);
  }
}

// One rounding to the storage type (half an ulp), and fp32 arithmetic on values of order one before it.
inline void require_rounded(const HostTensor& actual, const std::vector<double>& expected) {
  const bool f32 = actual.tensor().dtype() == DType::kF32;
  require_close(actual.values(), expected, f32 ? 2e-6 : 0x1.01p-8, 2e-6);
}

// Central differences of a fp64 function at x.
inline std::vector<double> numeric_gradient(const std::function<double(const std::vector<double>&)>& f,
                                            std::vector<double> x) {
  constexpr double kStep = 1e-4;
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + kStep;
    const double above = f(x);
    x[i] = at - kStep;
    const double below = f(x);
    x[i] = at;
    gradient[i] = (above - below) / (2 * kStep);
  }
  return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline std::vector<double> plus(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

}  // namespace invar::test
