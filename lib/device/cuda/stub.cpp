#include <cstring>

#include "device/device.h"

// In a build without CUDA.
namespace invar {

class CudaStream {};

namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorKind::kConfig, "this invar was built without CUDA",
              "set device: cpu, or build with -DINVAR_CUDA=ON");
}
}  // namespace

bool has_cuda() {
  return false;
}

int64_t cuda_device_id(int) {
  refuse();
}

int cuda_device_count() {
  return 0;
}

int current_cuda_device() {
  refuse();
}

std::string describe_cuda_device(int) {
  refuse();
}

std::string cuda_architecture(int) {
  refuse();
}

Stream make_cuda_stream(int, int) {
  refuse();
}

Stream queue_beside(const Stream& stream) {
  return stream;
}

void wait_for(const Stream&, const Stream&) {}

struct StreamMark::Event {};

void StreamMark::set(const Stream&) {}

void StreamMark::hold(const Stream&) const {}

void set_phase(const Stream&, const std::string&) {}

void start_profile(const Stream&) {}

void stop_profile(const Stream&) {}

void synchronize(const Stream&) {}

void copy_across(const Stream&, const Tensor& from, const Tensor& to) {
  INVAR_CHECK(from.dtype() == to.dtype() && from.numel() == to.numel(), "copy of {} to {}", from.describe(),
              to.describe());
  if (from.is_meta() || to.is_meta() || from.empty()) return;
  std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
}

void* allocate_cuda_memory(int64_t) {
  refuse();
}

void free_cuda_memory(void*) noexcept {}

CudaMemoryInfo cuda_memory_info() {
  return {};
}

struct DeviceTimer::Events {};

DeviceTimer::DeviceTimer() = default;

DeviceTimer::~DeviceTimer() = default;

void DeviceTimer::start(const Stream&) {
  start_ = std::chrono::steady_clock::now();
}

void DeviceTimer::stop(const Stream&) {
  stop_ = std::chrono::steady_clock::now();
}

double DeviceTimer::milliseconds() const {
  return std::chrono::duration<double, std::milli>(stop_ - start_).count();
}

}  // namespace invar
