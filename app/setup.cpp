#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <stdexcept>

#include "app/commands.h"
#include "comm/checks.h"
#include "device/memory.h"

namespace invar::app {

Error as_error(const std::exception& error) {
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                         dynamic_cast<const std::length_error*>(&error) != nullptr;
  if (!is_memory) return Error(ErrorKind::kFault, error.what());
  constexpr int64_t kMiB = 1 << 20;
  return Error(ErrorKind::kFault,
               format("out of memory: the host gave no more to this process, which holds {} MiB of {} MiB at its most",
                      peak_memory_bytes(Stream(DeviceType::kCpu)) / kMiB, host_memory().total / kMiB),
               "invar plan shows the memory per rank; use more hosts, smaller sizes, or fewer ranks on this one");
}

void together(Communicator& world, const std::function<void()>& part) {
  std::optional<Error> mine;
  try {
    part();
  } catch (const WaitFailed&) {
    throw;
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
std::array<struct sigaction, kStopSignals.size()>
    inherited{};  // what they did before; who started this may ignore them

void store_signal(int number) {
  stop_signal = number;
}

}  // namespace

const volatile std::sig_atomic_t* catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = store_signal;
  action.sa_flags = SA_RESTART;
  sigset_t stops;
  sigemptyset(&stops);
  for (size_t i = 0; i < kStopSignals.size(); ++i) {
    struct sigaction before {};
    sigaction(kStopSignals[i], &action, &before);
    if (before.sa_handler != store_signal) inherited[i] = before;
    sigaddset(&stops, kStopSignals[i]);
  }
  pthread_sigmask(SIG_UNBLOCK, &stops, nullptr);
  return &stop_signal;
}

void release_stop_signals() {
  for (size_t i = 0; i < kStopSignals.size(); ++i) sigaction(kStopSignals[i], &inherited[i], nullptr);
}

void heed_stop_signals() {
  release_stop_signals();
  if (stop_signal != 0) raise(stop_signal);
}

int threads_per_rank(int ranks_on_host, int cores_of_host) {
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr) {
    if (const int threads = std::atoi(text); threads > 0) return threads;
  }
  return std::clamp(cores_of_host / std::max(1, ranks_on_host), 1, usable_cores(bound_cores()));
}

int usable_cores(const CoreSet& cores) {
  return within_quota(count(cores));
}

std::string too_many_threads(int threads, int ranks, int cores) {
  if (threads * ranks <= cores) return "";
  const std::string what =
      format("{} ranks of {} threads share {} cores of this host and wait for each other: ", ranks, threads, cores);
  return what + (ranks > cores ? format("start at most {} ranks here, with OMP_NUM_THREADS=1", cores)
                               : format("set OMP_NUM_THREADS={}", cores / ranks));
}

}  // namespace invar::app
