#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <thread>

#include "core/control_groups.h"

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
  for_control_groups("cpu", root, [&](const fs::path& group, bool is_v2) {
    left = is_v2 ? cores_of_v2(group / "cpu.max", left) : cores_of_v1(group, left);
  });
  return std::max(1, static_cast<int>(left));
}

}  // namespace invar
