#include "device/memory.h"

#include <sys/resource.h>
#include <unistd.h>

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

int64_t host_memory_bytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

}  // namespace invar
