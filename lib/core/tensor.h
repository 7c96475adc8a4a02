#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"

namespace invar {

// Where a tensor's bytes live. A kMeta tensor has a shape and no bytes: operations and communicators check it and do
// nothing. `invar plan` and the sizing of arenas run the real step on kMeta.
enum class DeviceType : uint8_t { kCpu, kCuda, kMeta };

std::string_view name_of(DeviceType device);
// "(128, 64)"
std::string describe_shape(std::span<const int64_t> shape);

// A view of contiguous row-major elements, of one to four dims. It does not own them: arenas do.
class Tensor {
 public:
  static constexpr int kMaxDims = 4;

  Tensor() = default;
  // Error{kConfig} if the bytes cannot be counted in 63 bits, even on meta.
  Tensor(void* data, DType dtype, DeviceType device, std::span<const int64_t> shape);
  Tensor(void* data, DType dtype, DeviceType device, std::initializer_list<int64_t> shape)
      : Tensor(data, dtype, device, std::span<const int64_t>(shape.begin(), shape.size())) {}

  DType dtype() const { return dtype_; }
  DeviceType device() const { return device_; }
  bool is_meta() const { return device_ == DeviceType::kMeta; }
  int dims() const { return dims_; }
  int64_t dim(int index) const { return shape_[static_cast<size_t>(index < 0 ? dims_ + index : index)]; }
  std::span<const int64_t> shape() const { return {shape_.data(), static_cast<size_t>(dims_)}; }
  int64_t numel() const;
  int64_t bytes() const { return numel() * size_of(dtype_); }
  bool empty() const { return numel() == 0; }
  bool defined() const { return dims_ > 0; }

  void* raw() const { return data_; }
  // The elements; T must be the dtype (checked).
  template <class T>
  T* data() const {
    INVAR_CHECK(DTypeOf<T>::value == dtype_, "tensor of {} read as {}", name_of(dtype_), name_of(DTypeOf<T>::value));
    return static_cast<T*>(data_);
  }
  template <class T>
  std::span<T> span() const {
    return {data<T>(), static_cast<size_t>(numel())};
  }

  // Same elements in another shape of equal size.
  Tensor view(std::initializer_list<int64_t> shape) const;
  // Rows [begin, end) of dim 0.
  Tensor rows(int64_t begin, int64_t end) const;
  // "bf16 (128, 64)"
  std::string describe() const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  DeviceType device_ = DeviceType::kCpu;
  int dims_ = 0;
  std::array<int64_t, kMaxDims> shape_{};
};

// (n), the host memory of a vector.
template <class T>
Tensor view_of(std::vector<T>& values) {
  return Tensor(values.data(), DTypeOf<T>::value, DeviceType::kCpu, {std::ssize(values)});
}

}  // namespace invar
