// Entry point of the test executables that run under mpirun: every rank runs the same cases in the same order.
//
//   --hang-rank N   rank N waits until a debugger attaches, the others wait for it in a barrier
//   %r              in any argument becomes the rank: --reporter junit --out report.%r.xml
//
// Use CHECK, not REQUIRE, between collectives. A case that one rank leaves early (REQUIRE, an exception) puts it out of
// step with the others, so it ends the job there; any other failure of any rank fails the test at the end.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include <unistd.h>

#include <charconv>
#include <chrono>
#include <fstream>
#include <iostream>
#include <thread>

#include "support/mpi_world.h"

namespace invar {
namespace {

MpiSession* g_session = nullptr;

struct Arguments {
  std::vector<std::string> for_catch;
  int hang_rank = -1;
};

Arguments parse(int argc, char** argv, int rank) {
  Arguments out;
  for (int i = 0; i < argc; ++i) {
    std::string argument = argv[i];
    if (argument == "--hang-rank" && i + 1 < argc) {
      const std::string value = argv[++i];
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out.hang_rank);
      if (error != std::errc{} || end != value.data() + value.size()) {
        throw Error(ErrorKind::kConfig, format("--hang-rank {}: not a rank", value));
      }
      continue;
    }
    if (const auto at = argument.find("%r"); at != std::string::npos) argument.replace(at, 2, std::to_string(rank));
    out.for_catch.push_back(argument);
  }
  return out;
}

bool is_traced() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) return line != "TracerPid:\t0";
  }
  return true;  // no such file: do not wait for what cannot be seen
}

void wait_for_debugger(Communicator& world, int hang_rank) {
  if (world.rank() == hang_rank) {
    std::cerr << format("rank {} waits: gdb -p {}, set breakpoints, continue\n", hang_rank, getpid());
    while (!is_traced()) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  world.barrier();
}

#if __has_include(<catch2/catch_all.hpp>)
using ListenerBase = Catch::EventListenerBase;
using Reply = void;
#else
using ListenerBase = Catch::TestEventListenerBase;
using Reply = bool;
#endif

// Ends the job after a case that this rank left early. The reporter has printed why by then.
class StepGuard : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  Reply assertionEnded(const Catch::AssertionStats& stats) override {
    const auto& result = stats.assertionResult;
    const bool threw = result.getResultType() == Catch::ResultWas::ThrewException;
    const bool required = !Catch::shouldContinueOnFailure(result.m_info.resultDisposition);
    if (!result.isOk() && (threw || required)) left_early_ = true;
    return Reply(true);
  }

  void testCaseEnded(const Catch::TestCaseStats&) override {
    if (!left_early_) return;
    std::cout << format("rank {} left this test case early: the job ends\n", g_session->world().rank());
    g_session->abort(1);
  }

 private:
  bool left_early_ = false;
};

CATCH_REGISTER_LISTENER(StepGuard)

int run(int argc, char** argv) {
  MpiSession session(&argc, &argv);
  g_session = &session;
  Communicator& world = session.world();
  const Arguments arguments = parse(argc, argv, world.rank());
  if (arguments.hang_rank >= 0) wait_for_debugger(world, arguments.hang_rank);
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments.for_catch) pointers.push_back(argument.c_str());
  const int64_t failures = Catch::Session().run(static_cast<int>(pointers.size()), pointers.data());
  return static_cast<int>(all_reduce_value(world, failures, ReduceOp::kMax));
}

}  // namespace

MpiSession& mpi_session() {
  return *g_session;
}

}  // namespace invar

int main(int argc, char** argv) {
  try {
    return invar::run(argc, argv);
  } catch (const invar::Error& error) {
    std::cerr << error.what() << '\n';
    if (!error.hint().empty()) std::cerr << error.hint() << '\n';
    return static_cast<int>(error.kind());
  }
}
