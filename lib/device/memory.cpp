#include "device/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "core/control_groups.h"
#include "device/device.h"

namespace invar {

namespace fs = std::filesystem;

int64_t peak_memory_bytes(const Stream& stream) {
  if (stream.device() == DeviceType::kCuda) {
    const CudaMemoryInfo gpu = cuda_memory_info();
    return gpu.total - gpu.free;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

HostMemory host_memory(const fs::path& root) {
  HostMemory memory;
  memory.total = memory.available = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::ifstream sizes(root / "proc/meminfo");  // "MemAvailable:   123456 kB"
  for (std::string line; std::getline(sizes, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") memory.available = kib * 1024;
  }
  for_control_groups("memory", root, [&](const fs::path& group, bool is_v2) {
    int64_t limit = 0;  // "max" is no number
    if (!(std::ifstream(group / (is_v2 ? "memory.max" : "memory.limit_in_bytes")) >> limit)) return;
    memory.total = std::min(memory.total, limit);
    memory.available = std::min(memory.available, limit);
  });
  return memory;
}

}  // namespace invar
