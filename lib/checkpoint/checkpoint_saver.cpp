#include "checkpoint/checkpoint_saver.h"

#include <chrono>
#include <new>

#include "checkpoint/index_table.h"
#include "core/error.h"

namespace invar {
namespace {

using Clock = std::chrono::steady_clock;

// What went wrong, for a person; empty if nothing.
std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.hint().empty() ? error.what() : format("{} ({})", error.what(), error.hint());
  } catch (const std::bad_alloc&) {
    return "no memory left to write it";
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// The work that begin() starts; if it cannot, work that has failed for that reason, so that ranks can agree.
template <class T, class Begin>
std::future<T> started(const Begin& begin) {
  std::future<T> work;
  T failed;
  failed.failure = failure_of([&] { work = begin(); });
  if (failed.failure.empty()) return work;
  std::promise<T> known;
  known.set_value(std::move(failed));
  return known.get_future();
}

// What the work came to; nothing if there was none here.
template <class T>
T result_of(std::future<T>& work) {
  T result;
  const std::string failure = failure_of([&] {
    if (work.valid()) result = work.get();
  });
  if (!failure.empty()) result.failure = failure;
  return result;
}

void append(CleanUp& all, const CleanUp& more) {
  const auto add = [](std::string& list, const std::string& item) {
    if (!item.empty()) list += (list.empty() ? "" : "; ") + item;
  };
  add(all.done, more.done);
  add(all.problems, more.problems);
}

}  // namespace

CheckpointSaver::CheckpointSaver(Communicator& world, const Stream& stream, const std::filesystem::path& folder,
                                 Options options)
    : world_(world), stream_(stream), directory_(folder), options_(options) {}

std::optional<SaveResult> CheckpointSaver::save(const CheckpointInfo& info, const std::function<StatePart()>& part) {
  std::optional<SaveResult> previous = wait();
  flight_ = Flight{};
  flight_->start = Clock::now();
  flight_->failure = begin(info);
  if (flight_->failure.empty()) flight_->shard = begin_writing(info.step, part);
  return previous;
}

// A rank that fails here tells so when all ranks say how their writing went: the others need not wait for it now.
std::future<CheckpointSaver::Written> CheckpointSaver::begin_writing(int64_t step,
                                                                     const std::function<StatePart()>& part) {
  return started<Written>([&] {
    StatePart state = part();
    flight_->tensors = state.tensors;
    if (options_.async && state.host_copy == nullptr) state = host_copy(state);
    auto write = [folder = directory_.pending_path_of(step), rank = world_.rank(), mine = std::move(state)] {
      Written written;
      written.failure = failure_of([&] { written.shard = write_shard(folder, rank, mine); });
      return written;
    };
    return std::async(launch_policy(), std::move(write));
  });
}

std::optional<SaveResult> CheckpointSaver::poll() {
  return advance(Patience::kNone);
}

std::optional<SaveResult> CheckpointSaver::wait() {
  return advance(Patience::kWait);
}

std::optional<SaveResult> CheckpointSaver::advance(Patience patience) {
  if (!flight_) return std::nullopt;
  Flight& flight = *flight_;
  if (flight.failure.empty() && flight.shard.valid()) {
    if (!is_done(flight.shard, patience)) return std::nullopt;
    const Written written = result_of(flight.shard);
    flight.failure = agree(written.failure);
    if (flight.failure.empty()) begin_completion(flight, written.shard);
  }
  if (flight.failure.empty()) {
    if (!is_done(flight.completion, patience)) return std::nullopt;
    const Completed completed = result_of(flight.completion);
    flight.failure = agree(completed.failure);
    append(flight.clean_up, completed.clean_up);
  }
  return finish();
}

// On all ranks; one that has nothing to do is done.
template <class T>
bool CheckpointSaver::is_done(const std::future<T>& work, Patience patience) {
  if (patience == Patience::kWait) {
    if (work.valid()) work.wait();
    return true;
  }
  const bool here = !work.valid() || work.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
  return all_reduce_value(world_, int64_t{here}, ReduceOp::kMin) == 1;
}

// The pending folder, empty, seen by every rank before it writes.
std::string CheckpointSaver::begin(const CheckpointInfo& info) {
  return agree(failure_of([&] {
    flight_->info = info;
    if (world_.rank() != 0) return;
    flight_->clean_up = directory_.prepare(info.step);
  }));
}

StatePart CheckpointSaver::host_copy(const StatePart& part) {
  std::vector<int64_t> sizes;
  int64_t total = 0;
  for (const StateRun& run : part.runs) {
    const StateTensor& tensor = part.tensors[run.tensor];
    const int64_t row = tensor.transposed ? tensor.rows() * tensor.column_block : tensor.cols();
    sizes.push_back(run.rows.size() * row);
    total += sizes.back();
  }
  resize_copy(copy_, total);
  StatePart copied{part.tensors, part.runs, {}};
  float* next = copy_.data();
  for (size_t i = 0; i < part.runs.size(); ++i) {
    std::copy(part.runs[i].values, part.runs[i].values + sizes[i], next);
    copied.runs[i].values = next;
    next += sizes[i];
  }
  return copied;
}

// With thousands of pieces the index takes seconds: rank 0 writes it in a thread too. If it cannot begin, the others
// learn that when all ranks say how the completion went.
void CheckpointSaver::begin_completion(Flight& flight, const WrittenShard& shard) {
  std::vector<std::vector<int64_t>> shards;
  flight.failure = gather(shard, shards);
  if (!flight.failure.empty()) return;
  flight.bytes = all_reduce_value(world_, shard.file.bytes, ReduceOp::kSum);
  if (world_.rank() != 0) return;
  flight.completion = started<Completed>([&] { return complete(index_of(flight, shards)); });
}

CheckpointIndex CheckpointSaver::index_of(const Flight& flight, std::span<const std::vector<int64_t>> shards) {
  CheckpointIndex index;
  index.info = flight.info;
  index.tensors = flight.tensors;
  for (const std::vector<int64_t>& numbers : shards) {
    WrittenShard shard = decode_shard(numbers);
    if (shard.pieces.empty()) continue;
    index.files.push_back(shard.file);
    std::move(shard.pieces.begin(), shard.pieces.end(), std::back_inserter(index.pieces));
  }
  return index;
}

std::future<CheckpointSaver::Completed> CheckpointSaver::complete(CheckpointIndex index) {
  auto complete = [directory = directory_, options = options_, all = std::move(index)] {
    Completed completed;
    completed.failure = failure_of([&] {
      write_index(directory.pending_path_of(all.info.step), all);
      completed.clean_up = directory.publish(all.info.step);
    });
    if (!completed.failure.empty()) return completed;
    const std::string trouble = failure_of([&] {
      append(completed.clean_up, directory.prune(all.info.step, options.keep, options.keep_every));
      append(completed.clean_up, directory.clean_up());
    });
    append(completed.clean_up, {"", trouble});
    return completed;
  };
  return std::async(launch_policy(), std::move(complete));
}

SaveResult CheckpointSaver::finish() {
  SaveResult result{flight_->info.step, flight_->bytes,
                    std::chrono::duration<double>(Clock::now() - flight_->start).count(), flight_->failure,
                    flight_->clean_up};
  flight_.reset();
  if (!result.failure.empty() && world_.rank() == 0) directory_.discard(result.step);
  return result;
}

// What every rank wrote, on rank 0. All memory is there before a rank waits for another: one without enough of it makes
// the save fail on all.
std::string CheckpointSaver::gather(const WrittenShard& shard, std::vector<std::vector<int64_t>>& shards) {
  std::vector<int64_t> mine;
  std::string failure = failure_of([&] { mine = encode_shard(shard); });
  std::vector<int64_t> size = {std::ssize(mine)}, sizes(static_cast<size_t>(world_.size()));
  world_.all_gather(stream_, view_of(size), view_of(sizes), equal_counts(world_.size(), 1));
  if (world_.rank() == 0 && failure.empty()) {
    failure = failure_of([&] {
      for (const int64_t count : sizes) shards.emplace_back(static_cast<size_t>(count));
    });
  }
  failure = agree(failure);
  if (!failure.empty()) return failure;
  if (world_.rank() != 0) {
    world_.send(stream_, view_of(mine), 0);
    return "";
  }
  shards[0] = std::move(mine);
  for (int rank = 1; rank < world_.size(); ++rank) {
    world_.receive(stream_, view_of(shards[static_cast<size_t>(rank)]), rank);
  }
  return "";
}

std::string CheckpointSaver::agree(const std::string& mine) {
  const int64_t nobody = world_.size();
  const int64_t first = all_reduce_value(world_, mine.empty() ? nobody : int64_t{world_.rank()}, ReduceOp::kMin);
  if (first == nobody) return "";
  const bool is_first = first == world_.rank();
  const auto length =
      static_cast<size_t>(all_reduce_value(world_, is_first ? std::ssize(mine) : int64_t{0}, ReduceOp::kMax));
  std::vector<int32_t> letters(length);
  if (is_first) std::copy(mine.begin(), mine.end(), letters.begin());
  world_.broadcast(stream_, view_of(letters), static_cast<int>(first));
  const std::string message(letters.begin(), letters.end());
  return world_.size() == 1 ? message : format("rank {}: {}", world_.job_rank(static_cast<int>(first)), message);
}

}  // namespace invar
