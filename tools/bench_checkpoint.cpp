// bench_checkpoint FOLDER [million parameters]: saves and loads the training state of a Qwen3 of that size (88, about
// 1 GB of state, unless given) on one rank with a thread per core. Beside it what the machine does at best: the same
// bytes written and synced in one piece, copied in memory, and read in sequence. It loads five times in turn with the
// floor, from the page cache and then from the disk, and prints the medians.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>

#include "checkpoint/checkpoint_saver.h"
#include "comm/self_communicator.h"
#include "train/dry_run.h"
#include "train/train_state.h"

namespace {

using namespace invar;
namespace fs = std::filesystem;

double seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Config model_of(int64_t millions) {
  Config config;
  config.model.vocab_size = 16384;
  config.model.hidden_size = 512;
  config.model.intermediate_size = 2048;
  config.model.num_attention_heads = 8;
  config.model.num_key_value_heads = 4;
  config.model.head_dim = 64;
  config.model.tie_word_embeddings = true;
  config.model.num_hidden_layers = std::max<int64_t>(1, (millions * 1000000 - 8388608) / 3933000);
  config.numerics.precision = Precision::kF32;
  config.train.steps = 1;
  config.train.sequence_length = 8;
  return config;
}

void write_at_once(const fs::path& path, const std::vector<float>& values) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const char* next = reinterpret_cast<const char*>(values.data());
  size_t left = values.size() * sizeof(float);
  while (left > 0) {
    const ssize_t written = ::write(file, next, left);
    if (written <= 0) std::abort();
    next += written;
    left -= static_cast<size_t>(written);
  }
  ::fsync(file);
  ::close(file);
}

void read_at_once(const fs::path& path, std::vector<float>& values) {
  const int file = ::open(path.c_str(), O_RDONLY);
  char* next = reinterpret_cast<char*>(values.data());
  size_t left = values.size() * sizeof(float);
  while (left > 0) {
    const ssize_t count = ::read(file, next, left);
    if (count <= 0) std::abort();
    next += count;
    left -= static_cast<size_t>(count);
  }
  ::close(file);
}

enum class Cache { kWarm, kCold };

// Has the file in the page cache, or not at all.
void prepare(const fs::path& path, Cache cache) {
  const int file = ::open(path.c_str(), O_RDONLY);
  if (cache == Cache::kCold) {
    ::fsync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  } else {
    std::vector<char> block(1 << 20);
    while (::read(file, block.data(), block.size()) > 0) {
    }
  }
  ::close(file);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const char* what, double time, int64_t bytes) {
  std::printf("%-52s %8.3f s %8.2f GB/s\n", what, time, static_cast<double>(bytes) / 1e9 / time);
}

struct Bench {
  Communicator& world;
  const Stream& stream;
  fs::path folder;
  TrainState& state;

  SaveResult save(bool async, double& stall) {
    CheckpointSaver::Options options;
    options.async = async;
    CheckpointSaver saver(world, stream, folder, options);
    CheckpointInfo info;
    const StatePart part = state.own_part();
    saver.save(info, [&] { return part; });  // the copy's memory comes into being
    saver.wait();
    SaveResult result;
    stall = seconds([&] {
      saver.save(info, [&] { return part; });
      if (!async) result = saver.wait().value();
    });
    if (async) result = saver.wait().value();
    return result;
  }

  void load(Cache cache, std::vector<float>& floor, int64_t bytes) {
    const fs::path checkpoint = find_checkpoint(folder);
    std::vector<double> loads, floors;
    for (int round = 0; round < 5; ++round) {
      prepare(folder / "floor", cache);
      floors.push_back(seconds([&] { read_at_once(folder / "floor", floor); }));
      for (const fs::directory_entry& file : fs::directory_iterator(checkpoint)) prepare(file.path(), cache);
      loads.push_back(seconds([&] { state.load(CheckpointReader(checkpoint)); }));
    }
    const char* from = cache == Cache::kWarm ? "page cache" : "disk";
    print(format("load from the {}, every checksum verified", from).c_str(), median(loads), bytes);
    print(format("  floor: one sequential read from the {}", from).c_str(), median(floors), bytes);
    std::printf("  ratio %.2f\n", median(loads) / median(floors));
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_checkpoint FOLDER [million parameters]\n");
    return 2;
  }
  const fs::path folder = fs::path(argv[1]) / "bench_checkpoint";
  const Config config = model_of(argc > 2 ? std::atoll(argv[2]) : 88);
  const auto world = make_self_communicator();
  const ProcessGroups groups = make_process_groups(*world, Topology{});
  const Stream stream(DeviceType::kCpu, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  TrainState state(config, groups, stream, measure_memory(config, Topology{}, 0));
  initialise(state.parameters(), stream, 1, 0.02);
  state.adopt_values();
  fs::create_directories(folder);

  Bench bench{*world, stream, folder, state};
  double sync_stall = 0;
  double async_stall = 0;
  const SaveResult sync = bench.save(false, sync_stall);
  const SaveResult async = bench.save(true, async_stall);
  if (!sync.failure.empty() || !async.failure.empty()) {
    std::fprintf(stderr, "%s%s\n", sync.failure.c_str(), async.failure.c_str());
    return 1;
  }
  std::vector<float> values(static_cast<size_t>(sync.bytes) / sizeof(float));
  std::iota(values.begin(), values.end(), 0.0f);
  std::vector<float> copy(values);
  std::printf("%.2f GB of state\n", static_cast<double>(sync.bytes) / 1e9);
  print("synchronous save", sync_stall, sync.bytes);
  print("  floor: the bytes written and synced", seconds([&] { write_at_once(folder / "floor", values); }), sync.bytes);
  print("asynchronous save: training stands still", async_stall, sync.bytes);
  print("  floor: the bytes copied in memory", seconds([&] { std::copy(values.begin(), values.end(), copy.begin()); }),
        sync.bytes);
  print("asynchronous save: until it is complete", async.seconds, sync.bytes);
  for (const Cache cache : {Cache::kWarm, Cache::kCold}) bench.load(cache, copy, sync.bytes);
  fs::remove_all(folder);
  return 0;
}
