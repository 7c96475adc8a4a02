#include "core/tensor.h"

#include <ranges>

namespace invar {
namespace {

// From the last dim to the first, as the constructor checks it: no partial product overflows beside a dim of size 0.
int64_t product(std::span<const int64_t> shape) {
  int64_t result = 1;
  for (const int64_t size : shape | std::views::reverse) result *= size;
  return result;
}

}  // namespace

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

std::string describe_shape(std::span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += format("{}{}", i ? ", " : "", shape[i]);
  return text + ")";
}

Tensor::Tensor(void* data, DType dtype, DeviceType device, std::span<const int64_t> shape)
    : data_(data), dtype_(dtype), device_(device), dims_(static_cast<int>(shape.size())) {
  INVAR_CHECK(shape.size() >= 1 && shape.size() <= kMaxDims, "tensor of {} dims", shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    INVAR_CHECK(shape[i] >= 0, "negative size {} in dim {}", shape[i], i);
    shape_[i] = shape[i];
  }
  int64_t bytes = size_of(dtype);
  for (const int64_t size : shape | std::views::reverse) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) {
      throw Error(ErrorKind::kConfig,
                  format("a tensor of shape {} in {} is too large to address", describe_shape(shape), name_of(dtype)),
                  "reduce the sizes of the model or of the batch");
    }
  }
}

int64_t Tensor::numel() const {
  return dims_ == 0 ? 0 : product(shape());
}

Tensor Tensor::view(std::initializer_list<int64_t> shape) const {
  Tensor out(data_, dtype_, device_, shape);
  INVAR_CHECK(out.numel() == numel(), "view of {} as {}", describe(), out.describe());
  return out;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  INVAR_CHECK(dims_ > 0 && 0 <= begin && begin <= end && end <= dim(0), "rows [{}, {}) of {}", begin, end, describe());
  const int64_t stride = size_of(dtype_) * product(shape().subspan(1));
  Tensor out = *this;
  if (data_ != nullptr) out.data_ = static_cast<std::byte*>(data_) + begin * stride;
  out.shape_[0] = end - begin;
  return out;
}

std::string Tensor::describe() const {
  return format("{} {}", name_of(dtype_), describe_shape(shape()));
}

}  // namespace invar
