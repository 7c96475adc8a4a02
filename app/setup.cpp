#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <thread>

#include "app/commands.h"
#include "device/memory.h"

namespace invar::app {

Error as_error(const std::exception& error) {
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                         dynamic_cast<const std::length_error*>(&error) != nullptr;
  if (!is_memory) return Error(ErrorKind::kFault, error.what());
  constexpr int64_t kMiB = 1 << 20;
  return Error(ErrorKind::kFault,
               format("out of memory: the host gave no more to this process, which holds {} MiB of {} MiB at its most",
                      peak_memory_bytes(Stream(DeviceType::kCpu)) / kMiB, host_memory_bytes() / kMiB),
               "invar plan shows the memory per rank; use more hosts, smaller sizes, or fewer ranks on this one");
}

void together(Communicator& world, const std::function<void()>& part) {
  std::optional<Error> mine;
  try {
    part();
  } catch (const Error& error) {
    mine = error;
  } catch (const std::exception& error) {
    mine = as_error(error);
  }
  const int64_t nobody = world.size();
  const int64_t first = all_reduce_value(world, mine ? int64_t{world.rank()} : nobody, ReduceOp::kMin);
  if (first == nobody) return;
  const int64_t code =
      all_reduce_value(world, first == world.rank() ? static_cast<int64_t>(mine->kind()) : int64_t{0}, ReduceOp::kMax);
  if (first == world.rank()) throw SetupError{*mine};
  throw ReportedElsewhere{static_cast<int>(code)};
}

namespace {

volatile std::sig_atomic_t stop_signal = 0;  // a handler reaches nothing but globals
constexpr std::array kStopSignals = {SIGUSR1, SIGUSR2, SIGTERM};

}  // namespace

const volatile std::sig_atomic_t* catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = [](int number) { stop_signal = number; };
  action.sa_flags = SA_RESTART;
  sigset_t stops;
  sigemptyset(&stops);
  for (const int number : kStopSignals) {
    sigaction(number, &action, nullptr);
    sigaddset(&stops, number);
  }
  pthread_sigmask(SIG_UNBLOCK, &stops, nullptr);
  return &stop_signal;
}

void release_stop_signals() {
  for (const int number : kStopSignals) signal(number, SIG_DFL);
}

void heed_stop_signals() {
  release_stop_signals();
  if (stop_signal != 0) raise(stop_signal);
}

int threads_per_rank(int ranks_on_host) {
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr) {
    if (const int threads = std::atoi(text); threads > 0) return threads;
  }
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t bound;  // what the launcher has bound this rank to
  const int allowed = sched_getaffinity(0, sizeof(bound), &bound) == 0 ? CPU_COUNT(&bound) : cores;
  return std::max(1, std::min(allowed, cores / std::max(1, ranks_on_host)));
}

}  // namespace invar::app
