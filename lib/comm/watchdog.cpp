#include "comm/watchdog.h"

#include <algorithm>

#include "core/error.h"

namespace invar {
namespace {

std::chrono::milliseconds pause_of(std::chrono::milliseconds timeout) {
  return std::clamp(timeout / 20, std::chrono::milliseconds(1), std::chrono::milliseconds(500));
}

}  // namespace

Watchdog::Watchdog(std::chrono::milliseconds timeout, Report report, std::function<void()> thread_start)
    : timeout_(timeout),
      report_(std::move(report)),
      asks_([this, start = std::move(thread_start)] {
        if (start) start();
        ask();
      }),
      looks_after_([this] { look_after_ask(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  asks_.join();
  {
    const std::lock_guard lock(question_mutex_);
    stop_looking_ = true;
  }
  answered_.notify_one();
  looks_after_.join();
}

void Watchdog::watch(const void* owner, std::string description, std::function<bool()> is_done) {
  const std::lock_guard lock(mutex_);
  pending_.push_back({owner, std::move(description), std::move(is_done), std::chrono::steady_clock::now()});
}

void Watchdog::forget(const void* owner) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pending_, [&](const Work& work) { return work.owner == owner; });
}

void Watchdog::ask() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, pause_of(timeout_), [this] { return stop_; })) {
    const std::string trouble = check();
    if (trouble.empty()) continue;
    lock.unlock();
    report(trouble);
    return;
  }
}

// A probe may wait for a lock that the thread holds that hangs.
void Watchdog::look_after_ask() {
  std::unique_lock lock(question_mutex_);
  while (!answered_.wait_for(lock, pause_of(timeout_), [this] { return stop_looking_; })) {
    if (!question_ || std::chrono::steady_clock::now() - question_->asked < timeout_) continue;
    const std::string trouble = format("{}: the device does not answer", question_->description);
    lock.unlock();
    report(trouble);
    return;
  }
}

void Watchdog::report(const std::string& trouble) {
  std::call_once(reported_, [&] { report_(trouble); });
}

bool Watchdog::is_done(const Work& work) {
  const auto set = [this](std::optional<Question> question) {
    const std::lock_guard lock(question_mutex_);
    question_ = std::move(question);
  };
  set(Question{work.description, std::chrono::steady_clock::now()});
  struct Answer {
    const decltype(set)& clear;
    ~Answer() { clear(std::nullopt); }
  };
  const Answer answer{set};
  return work.is_done();
}

// What is wrong, for a person; empty if nothing. Failures first: they may be why something older does not end.
std::string Watchdog::check() {
  const auto now = std::chrono::steady_clock::now();
  for (auto work = pending_.begin(); work != pending_.end();) {
    try {
      if (!is_done(*work)) {
        ++work;
        continue;
      }
    } catch (const std::exception& error) {
      return format("{}: {}; the last one done: {}", work->description, error.what(), last_done_);
    }
    last_done_ = work->description;
    last_done_at_ = now;
    work = pending_.erase(work);
  }
  if (pending_.empty()) return "";
  const Work& oldest = pending_.front();
  const auto waits = now - std::max(oldest.queued, last_done_at_);
  if (waits < timeout_) return "";
  return format("{}: not done {:.1f} s after it was queued, {} more wait behind it; the last one done: {}",
                oldest.description, std::chrono::duration<double>(now - oldest.queued).count(), pending_.size() - 1,
                last_done_);
}

}  // namespace invar
