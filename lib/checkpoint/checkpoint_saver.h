#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/run_directory.h"
#include "comm/communicator.h"

namespace invar {

// How a save went; the same on every rank but where it says so.
struct SaveResult {
  int64_t step = 0;
  int64_t bytes = 0;
  double seconds = 0;   // from save() to the end
  std::string failure;  // empty: the checkpoint is complete, and `latest` names it
  CleanUp clean_up;     // of older ones; known to rank 0 alone
};

// Saves the state of all ranks into a run's folder of checkpoints: every rank its shard, rank 0 the index, then rename,
// `latest`, and removal of old ones. A save that fails anywhere leaves the earlier checkpoints and `latest` as they
// are. All calls but the destructor, which waits for this rank's writing, are collective over the world.
class CheckpointSaver {
 public:
  struct Options {
    bool async = true;  // copy to host memory, write in a thread
    int64_t keep = 1;
    int64_t keep_every = 0;
  };

  CheckpointSaver(Communicator& world, const Stream& stream, const std::filesystem::path& folder, Options options);

  // Waits for a save in flight, whose result it returns; then begins this one. part() gives what this rank has; it is
  // copied if async. A rank that cannot give or copy it, for want of memory, makes this save fail on all.
  std::optional<SaveResult> save(const CheckpointInfo& info, const std::function<StatePart()>& part);
  // The result of the save in flight once all ranks have written, else nothing. Communicates only if one is in flight.
  std::optional<SaveResult> poll();
  // The same, waiting.
  std::optional<SaveResult> wait();

 private:
  // What a rank's writing came to; not an exception, so that ranks can agree.
  struct Written {
    WrittenShard shard;
    std::string failure;
  };
  struct Completed {
    std::string failure;
    CleanUp clean_up;
  };
  struct Flight {
    CheckpointInfo info;
    std::vector<StateTensor> tensors;
    std::chrono::steady_clock::time_point start;
    std::string failure;  // which all ranks know of
    CleanUp clean_up;
    int64_t bytes = 0;
    std::future<Written> shard;         // while it is not yet known to be written everywhere
    std::future<Completed> completion;  // after that, of rank 0: index, rename, `latest`
  };
  enum class Patience : uint8_t { kNone, kWait };

  std::launch launch_policy() const { return options_.async ? std::launch::async : std::launch::deferred; }
  StatePart host_copy(const StatePart& part);
  std::string begin(const CheckpointInfo& info);
  std::future<Written> begin_writing(int64_t step, const std::function<StatePart()>& part);
  std::optional<SaveResult> advance(Patience patience);
  template <class T>
  bool is_done(const std::future<T>& work, Patience patience);
  void begin_completion(Flight& flight, const WrittenShard& shard);
  std::string gather(const WrittenShard& shard, std::vector<std::vector<int64_t>>& shards);
  static CheckpointIndex index_of(const Flight& flight, std::span<const std::vector<int64_t>> shards);
  std::future<Completed> complete(CheckpointIndex index);
  SaveResult finish();
  // The message of the lowest rank that has one, on every rank.
  std::string agree(const std::string& mine);

  Communicator& world_;
  const Stream& stream_;
  RunDirectory directory_;
  Options options_;
  std::vector<float> copy_;
  std::optional<Flight> flight_;
};

}  // namespace invar
