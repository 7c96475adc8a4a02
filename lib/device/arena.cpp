#include "device/arena.h"

#include <sys/mman.h>

#include <utility>

#include "device/device.h"

namespace invar {
namespace {

// Anonymous pages come zeroed, page-aligned, and cost nothing until touched. Null if they cannot be had.
void* map_pages(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

Arena::Arena(std::string name, DeviceType device, int64_t capacity_bytes)
    : name_(std::move(name)), device_(device), capacity_(capacity_bytes) {
  if (device_ == DeviceType::kMeta || capacity_ == 0) return;
  base_ =
      static_cast<std::byte*>(device_ == DeviceType::kCuda ? allocate_cuda_memory(capacity_) : map_pages(capacity_));
  if (base_ == nullptr) {
    throw OutOfMemory(ErrorKind::kFault, format("out of memory: {} MiB for '{}'", capacity_ >> 20, name_),
                      "run `invar plan` to see the memory per rank; use more ranks, a smaller micro-batch or "
                      "train.recompute: selective or full");
  }
}

Arena::Arena(Arena&& other) noexcept
    : name_(std::move(other.name_)),
      device_(other.device_),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      high_water_(other.high_water_),
      base_(std::exchange(other.base_, nullptr)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(device_, other.device_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(high_water_, other.high_water_);
  std::swap(base_, other.base_);
  return *this;
}

Arena::~Arena() {
  if (base_ == nullptr) return;
  if (device_ == DeviceType::kCuda) {
    free_cuda_memory(base_);
  } else {
    munmap(base_, static_cast<size_t>(capacity_));
  }
}

Tensor Arena::allocate(std::string_view label, DType dtype, std::initializer_list<int64_t> shape) {
  constexpr int64_t kLargest = int64_t{1} << 56;  // so that sums of a few arenas can be counted
  Tensor tensor(nullptr, dtype, device_, shape);
  int64_t padded, end;
  if (__builtin_add_overflow(tensor.bytes(), kAlignment - 1, &padded) ||
      __builtin_add_overflow(used_, padded / kAlignment * kAlignment, &end) || end > kLargest) {
    throw Error(
        ErrorKind::kConfig,
        format("arena '{}': '{}' of {} after {} bytes is too large to address", name_, label, tensor.describe(), used_),
        "reduce the sizes of the model or of the batch");
  }
  if (device_ != DeviceType::kMeta) {
    INVAR_CHECK(end <= capacity_, "arena '{}' of {} bytes is full: {} used, '{}' wants {}", name_, capacity_, used_,
                label, end - used_);
    tensor = Tensor(base_ + used_, dtype, device_, shape);
  }
  used_ = end;
  high_water_ = std::max(high_water_, used_);
  return tensor;
}

void Arena::release(Mark mark) {
  INVAR_CHECK(mark <= used_, "arena '{}': released past its end", name_);
  used_ = mark;
}

}  // namespace invar
