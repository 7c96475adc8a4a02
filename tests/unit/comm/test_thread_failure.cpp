#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "comm/thread_communicator.h"
#include "support/catch.h"
#include "support/guarded_buffer.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kCpu);

// Messages of the errors that each rank got from its own calls.
class Outcomes {
 public:
  void run(Communicator& world, const std::function<void()>& body) {
    try {
      body();
    } catch (const std::exception& error) {
      {
        const std::lock_guard lock(mutex_);
        messages_[world.rank()] = error.what();
      }
      throw;
    }
  }
  std::string of(int rank) const {
    const auto it = messages_.find(rank);
    return it == messages_.end() ? "" : it->second;
  }
  size_t count() const { return messages_.size(); }

 private:
  std::mutex mutex_;
  std::map<int, std::string> messages_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class Accident : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Lets others come to their waits. What is checked holds if they do not, too.
void pause() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// Says so when its thread ends: by then the job knows of an exception that left the rank.
struct AtEnd {
  std::atomic<bool>& ended;
  ~AtEnd() {
    ended = true;
    ended.notify_all();
  }
};

}  // namespace

TEST_CASE("a rank that throws releases the ranks that wait, whatever they wait in") {
  const std::map<std::string, std::function<void(Communicator&, Communicator&)>> waits = {
      {"barrier in group 'world'", [](Communicator& world, Communicator&) { world.barrier(); }},
      {"all_reduce in group 'world'",
       [](Communicator& world, Communicator&) { all_reduce_value(world, int64_t{1}, ReduceOp::kSum); }},
      {"split in group 'world'", [](Communicator& world, Communicator&) { world.split(0, 0, "again"); }},
      // Rank 2, which fails, is in the other group.
      {"receive in group 'pair'",
       [](Communicator&, Communicator& pair) {
         GuardedBuffer<float> buffer(3);
         if (pair.rank() == 0) pair.receive(kStream, buffer.tensor(), 1);
         pair.barrier();
       }},
  };
  for (const auto& [where, wait] : waits) {
    Outcomes outcomes;
    const auto body = [&, &blocking = wait](Communicator& world) {
      const auto pair = world.split(world.rank() / 2, 0, "pair");
      outcomes.run(world, [&] {
        if (world.rank() == 2) {
          pause();
          throw Accident("out of luck");
        }
        blocking(world, *pair);
        world.barrier();
      });
    };
    INFO(where);
    CHECK_THROWS_AS(run_thread_ranks(4, body), Accident);
    CHECK(outcomes.of(2) == "out of luck");
    CHECK(contains(outcomes.of(0), where));
    CHECK(contains(outcomes.of(0), "another rank failed"));
    CHECK(outcomes.count() == 4);
  }
}

TEST_CASE("the sender of a message that nobody takes is released") {
  Outcomes outcomes;
  const auto body = [&](Communicator& world) {
    outcomes.run(world, [&] {
      GuardedBuffer<float> buffer(3, [](int64_t) { return 1.0f; });
      if (world.rank() == 0) world.send(kStream, buffer.tensor(), 1);
      if (world.rank() == 1) {
        pause();
        throw Accident("out of luck");
      }
    });
  };
  CHECK_THROWS_AS(run_thread_ranks(3, body), Accident);
  CHECK(contains(outcomes.of(0), "send in group 'world' (rank 0 of 3)"));
  CHECK(outcomes.of(2) == "");
}

TEST_CASE("the first exception is rethrown, not those that follow from it") {
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> first_ended = false;
    const auto body = [&](Communicator& world) {
      const auto inner = world.split(0, 0, "inner");
      if (world.rank() == 1) {
        thread_local const AtEnd at_end{first_ended};
        throw Accident("first");
      }
      try {
        inner->barrier();
      } catch (const Error&) {
        first_ended.wait(false);
        if (world.rank() == 0) throw Accident("second");
        throw;
      }
    };
    CHECK_THROWS_WITH(run_thread_ranks(3, body), "first");
  }
}

TEST_CASE("an exception is rethrown though what follows from it is reported earlier") {
  struct SlowDestruction {
    bool slow;
    ~SlowDestruction() {
      if (slow) pause();
    }
  };
  const auto body = [](Communicator& world) {
    const SlowDestruction unwinding{world.rank() == 1};
    const auto inner = world.split(0, 0, "inner");  // goes first and releases the others
    if (world.rank() == 1) throw Accident("first");
    inner->barrier();
  };
  CHECK_THROWS_WITH(run_thread_ranks(2, body), "first");
}

TEST_CASE("a rank that returns early releases the ranks that wait for it") {
  Outcomes outcomes;
  const auto body = [&](Communicator& world) {
    outcomes.run(world, [&] {
      if (world.rank() != 1) world.barrier();
    });
  };
  CHECK_THROWS_WITH(run_thread_ranks(3, body), Catch::Matchers::Contains("barrier in group 'world'"));
  CHECK(outcomes.count() == 2);

  const auto receive = [&](Communicator& world) {
    GuardedBuffer<float> buffer(3);
    if (world.rank() == 0) world.receive(kStream, buffer.tensor(), 2);
  };
  CHECK_THROWS_WITH(run_thread_ranks(3, receive), Catch::Matchers::Contains("receive in group 'world'"));
}

TEST_CASE("ranks that wait for each other in other calls end after the timeout and say who did not come") {
  Outcomes outcomes;
  const auto body = [&](Communicator& world) {
    outcomes.run(world, [&] {
      if (world.rank() == 1) return world.receive(kStream, GuardedBuffer<float>(1).tensor(), 2);
      world.barrier();
    });
  };
  CHECK_THROWS(run_thread_ranks(4, body, std::chrono::seconds(2)));
  const std::string one = outcomes.of(1);
  const std::string all = outcomes.of(0) + outcomes.of(2) + outcomes.of(3);
  INFO(one << "\n" << all);
  // The first one that gives up releases the others.
  CHECK((one.find("not done 2.0 s after it began: rank 2 did not come") != std::string::npos ||
         all.find("not done 2.0 s after it began: rank 1 did not come") != std::string::npos));
  CHECK(outcomes.count() == 4);
}

TEST_CASE("calls that do not fit together fail on every rank and name both") {
  struct Case {
    std::string message;
    std::function<void(Communicator&)> call;
  };
  GuardedBuffer<float> memory(64, [](int64_t) { return 1.0f; });
  const auto sized = [](GuardedBuffer<float>& buffer, int64_t count) { return buffer.part(0, count); };
  const Case cases[] = {
      {"rank 0 calls all_reduce of 4 f32 (sum), rank 2 calls all_reduce of 5 f32 (sum)",
       [&](Communicator& world) {
         GuardedBuffer<float> buffer(8);
         world.all_reduce(kStream, sized(buffer, world.rank() == 2 ? 5 : 4), ReduceOp::kSum);
       }},
      {"rank 0 calls all_reduce of 4 f32 (sum), rank 2 calls all_reduce of 4 f32 (max)",
       [&](Communicator& world) {
         GuardedBuffer<float> buffer(4);
         world.all_reduce(kStream, buffer.tensor(), world.rank() == 2 ? ReduceOp::kMax : ReduceOp::kSum);
       }},
      {"rank 0 calls all_reduce of 1 i64 (sum), rank 2 calls all_reduce of 1 f64 (sum)",
       [&](Communicator& world) {
         if (world.rank() == 2) {
           all_reduce_value(world, 1.0, ReduceOp::kSum);
         } else {
           all_reduce_value(world, int64_t{1}, ReduceOp::kSum);
         }
       }},
      {"rank 0 calls barrier, rank 2 calls broadcast of 4 f32 from rank 1",
       [&](Communicator& world) {
         GuardedBuffer<float> buffer(4);
         if (world.rank() != 2) return world.barrier();
         world.broadcast(kStream, buffer.tensor(), 1);
       }},
      {"rank 0 calls all_gather of 6 f32, rank 2 calls all_gather of 6 f32 with other counts",
       [&](Communicator& world) {
         GuardedBuffer<float> send(8), receive(6);
         const std::vector<int64_t> counts = world.rank() == 2 ? std::vector<int64_t>{3, 1, 2} : equal_counts(3, 2);
         world.all_gather(kStream, sized(send, 2), receive.tensor(), counts);
       }},
      {"rank 2 sends 1 to rank 1, which expects 2",
       [&](Communicator& world) {
         GuardedBuffer<float> send(6), receive(6);
         const bool last = world.rank() == 2;
         world.all_to_all(kStream, sized(send, last ? 5 : 6), last ? std::vector<int64_t>{2, 1, 2} : equal_counts(3, 2),
                          receive.tensor(), equal_counts(3, 2));
       }},
      {"rank 0 calls split, rank 2 calls barrier",
       [&](Communicator& world) {
         if (world.rank() == 2) return world.barrier();
         world.split(0, 0, "part");
       }},
  };
  for (const Case& test : cases) {
    Outcomes outcomes;
    INFO(test.message);
    CHECK_THROWS_AS(run_thread_ranks(3, [&](Communicator& world) { outcomes.run(world, [&] { test.call(world); }); }),
                    Error);
    for (int rank = 0; rank < 3; ++rank) {
      INFO("rank " << rank << ": " << outcomes.of(rank));
      CHECK(contains(outcomes.of(rank), test.message));
    }
  }
}

TEST_CASE("a message of another size fails on both sides") {
  Outcomes outcomes;
  const auto body = [&](Communicator& world) {
    outcomes.run(world, [&] {
      GuardedBuffer<float> buffer(5);
      if (world.rank() == 0) world.send(kStream, buffer.part(0, 4), 1);
      if (world.rank() == 1) world.receive(kStream, buffer.part(0, 5), 0);
    });
  };
  CHECK_THROWS_AS(run_thread_ranks(2, body), Error);
  CHECK(contains(outcomes.of(0), "rank 1 expected another size or dtype"));
  CHECK(contains(outcomes.of(1), "rank 0 sends f32 (4), expected f32 (5)"));
}

TEST_CASE("a group outlives a mismatch that its ranks handle") {
  run_thread_ranks(3, [](Communicator& world) {
    GuardedBuffer<float> buffer(4);
    try {
      world.broadcast(kStream, buffer.part(0, world.rank()), 0);
    } catch (const Error&) {
    }
    const int64_t sum = all_reduce_value(world, int64_t{1}, ReduceOp::kSum);
    if (sum != 3) throw Accident("broken group");
  });
}

TEST_CASE("there are no runs of zero ranks") {
  CHECK_THROWS_AS(run_thread_ranks(0, [](Communicator&) {}), Error);
}

}  // namespace invar
