#include "comm/watchdog.h"

#include <algorithm>

#include "core/error.h"

namespace invar {

Watchdog::Watchdog(std::chrono::milliseconds timeout, Report report, std::function<void()> thread_start)
    : timeout_(timeout), report_(std::move(report)), thread_([this, start = std::move(thread_start)] {
        if (start) start();
        run();
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Watchdog::watch(std::string description, std::function<bool()> is_done) {
  const std::lock_guard lock(mutex_);
  pending_.push_back({std::move(description), std::move(is_done), std::chrono::steady_clock::now()});
}

void Watchdog::run() {
  const auto pause = std::clamp(timeout_ / 20, std::chrono::milliseconds(1), std::chrono::milliseconds(500));
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, pause, [this] { return stop_; })) {
    const std::string trouble = check();
    if (trouble.empty()) continue;
    lock.unlock();
    report_(trouble);
    return;
  }
}

// What is wrong, for a person; empty if nothing.
std::string Watchdog::check() {
  while (!pending_.empty()) {
    const Work& work = pending_.front();
    const auto age = std::chrono::steady_clock::now() - work.queued;
    const auto seconds = std::chrono::duration<double>(age).count();
    try {
      if (work.is_done()) {
        last_done_ = work.description;
        pending_.pop_front();
        continue;
      }
    } catch (const std::exception& error) {
      return format("{}: {}; the last one done: {}", work.description, error.what(), last_done_);
    }
    if (age < timeout_) return "";
    return format("{}: not done {:.1f} s after it was queued, {} more wait behind it; the last one done: {}",
                  work.description, seconds, pending_.size() - 1, last_done_);
  }
  return "";
}

}  // namespace invar
