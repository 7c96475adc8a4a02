#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "comm/thread_communicator.h"
#include "support/communicator_suite.h"

namespace invar {

// What all ranks found in one case, run over wrap(world) on each of `size` threads.
template <class Wrap>
std::vector<std::string> thread_findings(int size, const SuiteCase& test, Wrap wrap) {
  std::mutex mutex;
  std::vector<std::string> all;
  run_thread_ranks(size, [&](Communicator& world) {
    Findings findings;
    test.run(wrap(world), findings);
    const std::lock_guard lock(mutex);
    for (const std::string& finding : findings.list()) all.push_back(format("rank {}: {}", world.rank(), finding));
  });
  return all;
}

inline std::vector<std::string> thread_findings(int size, const SuiteCase& test) {
  return thread_findings(size, test, [](Communicator& world) -> Communicator& { return world; });
}

}  // namespace invar
