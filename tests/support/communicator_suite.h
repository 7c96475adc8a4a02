#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace invar {

// What a rank found wrong. Not a Catch2 assertion, which thread ranks must not make and which would take one rank out
// of step with the others: a rank always goes through the whole case.
class Findings {
 public:
  void expect(bool holds, const std::string& what) {
    if (holds) return;
    if (list_.size() < kEnough) list_.push_back(what);
  }
  const std::vector<std::string>& list() const { return list_; }

 private:
  static constexpr size_t kEnough = 5;
  std::vector<std::string> list_;
};

// One body for all communicators: every rank of `world` runs the same cases in the same order.
struct SuiteCase {
  std::string name;
  void (*run)(Communicator& world, Findings& findings);
};

std::vector<SuiteCase> communicator_suite();

// The parts of the suite: what moves data, and what governs groups and misuse.
std::vector<SuiteCase> collective_cases();
std::vector<SuiteCase> group_cases();

}  // namespace invar
