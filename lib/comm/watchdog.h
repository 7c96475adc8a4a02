#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace invar {

// Watches work that is queued and finishes later. Work that is not done `timeout` after it was queued and what was
// queued before it was done, failures that a probe finds, and a probe that itself does not return in that time are
// reported once; then nothing more.
class Watchdog {
 public:
  using Report = std::function<void(const std::string&)>;

  // `report` is called in a thread of the watchdog.
  Watchdog(std::chrono::milliseconds timeout, Report report, std::function<void()> thread_start = {});
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // `is_done` is asked in the watchdog's thread until it says so; it may throw, which is a failure of this work.
  void watch(const void* owner, std::string description, std::function<bool()> is_done);
  // No longer asks about the owner's work; on return no question is under way.
  void forget(const void* owner);

 private:
  struct Work {
    const void* owner;
    std::string description;
    std::function<bool()> is_done;
    std::chrono::steady_clock::time_point queued;
  };

  // What the first thread waits for, for the second one to see.
  struct Question {
    std::string description;
    std::chrono::steady_clock::time_point asked;
  };

  void ask();
  void look_after_ask();
  std::string check();
  bool is_done(const Work& work);
  void report(const std::string& trouble);

  std::chrono::milliseconds timeout_;
  Report report_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> pending_;  // in the order in which they were queued
  std::string last_done_ = "none";
  std::chrono::steady_clock::time_point last_done_at_{};
  bool stop_ = false;
  std::thread asks_;

  std::mutex question_mutex_;
  std::condition_variable answered_;
  std::optional<Question> question_;
  bool stop_looking_ = false;
  std::once_flag reported_;
  std::thread looks_after_;
};

}  // namespace invar
