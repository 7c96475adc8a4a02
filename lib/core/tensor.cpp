#include "core/tensor.h"

namespace invar {

std::string_view name_of(DeviceType device) {
  switch (device) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda";
    case DeviceType::kMeta:
      return "meta";
  }
  return "?";
}

Tensor::Tensor(void* data, DType dtype, DeviceType device, std::span<const int64_t> shape)
    : data_(data), dtype_(dtype), device_(device), dims_(static_cast<int>(shape.size())) {
  INVAR_CHECK(shape.size() >= 1 && shape.size() <= kMaxDims, "tensor of {} dims", shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    INVAR_CHECK(shape[i] >= 0, "negative size {} in dim {}", shape[i], i);
    shape_[i] = shape[i];
  }
}

int64_t Tensor::numel() const {
  if (dims_ == 0) return 0;
  int64_t n = 1;
  for (int i = 0; i < dims_; ++i) n *= shape_[static_cast<size_t>(i)];
  return n;
}

Tensor Tensor::view(std::initializer_list<int64_t> shape) const {
  Tensor out(data_, dtype_, device_, shape);
  INVAR_CHECK(out.numel() == numel(), "view of {} as {}", describe(), out.describe());
  return out;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  INVAR_CHECK(dims_ > 0 && 0 <= begin && begin <= end && end <= dim(0), "rows [{}, {}) of {}", begin, end, describe());
  int64_t stride = size_of(dtype_);
  for (int i = 1; i < dims_; ++i) stride *= shape_[static_cast<size_t>(i)];
  Tensor out = *this;
  if (data_ != nullptr) out.data_ = static_cast<std::byte*>(data_) + begin * stride;
  out.shape_[0] = end - begin;
  return out;
}

std::string Tensor::describe() const {
  std::string text = format("{} (", name_of(dtype_));
  for (int i = 0; i < dims_; ++i) text += format("{}{}", i ? ", " : "", shape_[static_cast<size_t>(i)]);
  return text + ")";
}

}  // namespace invar
