#include "parallel/host_share.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "core/philox.h"

namespace invar {

// Containers may have the same name on two hosts, and other names on one.
std::string this_host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return format("{} {}", name.data(), boot);
}

HostShare share_of_host(Communicator& world, int64_t value, const std::string& host) {
  const auto own = static_cast<int64_t>(hash_name(host));
  std::vector<int64_t> all(static_cast<size_t>(2 * world.size()));  // host and value of each rank
  const auto place = static_cast<size_t>(2 * world.rank());
  all[place] = own;
  all[place + 1] = value;
  world.all_reduce(Stream(DeviceType::kCpu), view_of(all), ReduceOp::kSum);  // of which ranks without peers get zeros
  HostShare share;
  for (size_t i = 0; i < all.size(); i += 2) {
    if (all[i] != own) continue;
    ++share.ranks;
    share.sum += all[i + 1];
  }
  return share;
}

}  // namespace invar
