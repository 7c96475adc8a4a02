#include "device/memory.h"

#include <sys/resource.h>

#include "device/device.h"

namespace invar {

int64_t peak_memory_bytes(const Stream& stream) {
  if (stream.device() == DeviceType::kCuda) {
    const CudaMemoryInfo gpu = cuda_memory_info();
    return gpu.total - gpu.free;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace invar
