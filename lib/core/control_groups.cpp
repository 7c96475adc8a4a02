#include "core/control_groups.h"

#include <fstream>
#include <string>

namespace invar {

namespace fs = std::filesystem;

void for_control_groups(std::string_view controller, const fs::path& root, const LookAtGroup& look) {
  const std::string own = "," + std::string(controller) + ",";
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
    const size_t kinds = line.find(':'), path = line.find(':', kinds + 1);
    if (kinds == std::string::npos || path == std::string::npos) continue;
    const std::string controllers = "," + line.substr(kinds + 1, path - kinds - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(own) == std::string::npos) continue;
    // In a container the path may be the host's, which is not there: what is mounted as the root is its own group.
    const fs::path mounted = root / "sys/fs/cgroup";
    const fs::path top = is_v2 ? mounted : mounted / controller;
    for (fs::path group = fs::path(line.substr(path + 1)).relative_path();; group = group.parent_path()) {
      look(top / group, is_v2);
      if (group.empty()) break;
    }
  }
}

}  // namespace invar
