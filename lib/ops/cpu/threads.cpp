#include "ops/cpu/threads.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace invar::ops::cpu {
namespace {

thread_local bool inside_a_body = false;

// The threads that one thread keeps. Not OpenMP's: those spin while they wait, which only the environment can change,
// and on a core that another rank needs a step takes hundreds of times as long.
class Workers {
 public:
  ~Workers() {
    ending_ = true;
    for (Worker& worker : workers_) worker.call();
    for (Worker& worker : workers_) worker.thread.join();
  }

  void run(int count, void (*body)(const void*, int), const void* context) {
    while (std::ssize(workers_) < count - 1) start();
    body_ = body;
    context_ = context;
    left_.store(count - 1, std::memory_order_relaxed);
    for (int index = 1; index < count; ++index) workers_[static_cast<size_t>(index - 1)].call();
    inside_a_body = true;
    body(context, 0);
    inside_a_body = false;
    for (int left = left_.load(std::memory_order_acquire); left != 0; left = left_.load(std::memory_order_acquire)) {
      left_.wait(left, std::memory_order_acquire);
    }
  }

 private:
  struct alignas(64) Worker {
    std::atomic<uint32_t> calls = 0;
    std::thread thread;

    void call() {
      calls.fetch_add(1, std::memory_order_release);
      calls.notify_one();
    }
  };

  void start() {
    Worker& worker = workers_.emplace_back();
    const int index = static_cast<int>(workers_.size());
    try {
      worker.thread = std::thread([this, &worker, index] { serve(worker, index); });
    } catch (const std::system_error& error) {
      workers_.pop_back();
      throw Error(ErrorKind::kFault, format("thread {} cannot be started: {}", index + 1, error.code().message()),
                  "set OMP_NUM_THREADS to a smaller number of threads for each rank");
    }
  }

  // Every call is answered before the next one comes.
  void serve(Worker& worker, int index) {
    inside_a_body = true;
    for (uint32_t answered = 0;; ++answered) {
      worker.calls.wait(answered, std::memory_order_acquire);
      if (ending_) return;
      body_(context_, index);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
    }
  }

  std::deque<Worker> workers_;  // which stay where they are
  void (*body_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  bool ending_ = false;
  alignas(64) std::atomic<int> left_ = 0;
};

}  // namespace

void run_on_threads(int count, void (*body)(const void*, int), const void* context) {
  if (count <= 1 || inside_a_body) {
    for (int index = 0; index < count; ++index) body(context, index);
    return;
  }
  thread_local Workers workers;
  workers.run(count, body, context);
}

}  // namespace invar::ops::cpu
