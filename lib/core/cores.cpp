#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <string>
#include <thread>

namespace invar {

namespace fs = std::filesystem;

namespace {

// "max 100000" or "150000 100000", microseconds of time in each period. A file that is not there limits nothing.
double cores_of_v2(const fs::path& file, double cores) {
  double quota = 0, period = 0;
  return std::ifstream(file) >> quota >> period && quota > 0 && period > 0 ? std::min(cores, quota / period) : cores;
}

// The same in two files; a quota of -1 is none.
double cores_of_v1(const fs::path& folder, double cores) {
  double quota = 0, period = 0;
  const bool found =
      std::ifstream(folder / "cpu.cfs_quota_us") >> quota && std::ifstream(folder / "cpu.cfs_period_us") >> period;
  return found && quota > 0 && period > 0 ? std::min(cores, quota / period) : cores;
}

}  // namespace

CoreSet bound_cores() {
  CoreSet cores{};
  static_assert(sizeof(cores) % sizeof(unsigned long) == 0);
  if (sched_getaffinity(0, sizeof(cores), reinterpret_cast<cpu_set_t*>(cores.data())) == 0 && count(cores) > 0) {
    return cores;
  }
  const auto all = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 64 * cores.size());
  for (size_t core = 0; core < all; ++core) cores[core / 64] |= uint64_t{1} << core % 64;
  return cores;
}

int count(const CoreSet& cores) {
  int total = 0;
  for (const uint64_t word : cores) total += std::popcount(word);
  return total;
}

int within_quota(int cores, const fs::path& root) {
  auto left = static_cast<double>(cores);
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
    const size_t kinds = line.find(':'), path = line.find(':', kinds + 1);
    if (kinds == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = "," + line.substr(kinds + 1, path - kinds - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(",cpu,") == std::string::npos) continue;
    // In a container the path may be the host's, which is not there: what is mounted as the root is its own group.
    const fs::path top = root / (is_v2 ? "sys/fs/cgroup" : "sys/fs/cgroup/cpu");
    for (fs::path group = fs::path(line.substr(path + 1)).relative_path();; group = group.parent_path()) {
      left = is_v2 ? cores_of_v2(top / group / "cpu.max", left) : cores_of_v1(top / group, left);
      if (group.empty()) break;
    }
  }
  return std::max(1, static_cast<int>(left));
}

}  // namespace invar
