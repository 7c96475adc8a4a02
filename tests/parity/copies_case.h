#pragma once

// One element of one rank's memory is changed between two steps of a run: the next comparison of copies names it.

#include <bit>
#include <map>
#include <mutex>
#include <optional>

#include "comm/device_communicator.h"
#include "comm/thread_communicator.h"
#include "invariant_models.h"
#include "support/errors.h"
#include "train/copy_check.h"

namespace invar::test {

enum class Place : bool { kWeight, kMaster };

enum class Bit : uint8_t { kLowest, kHighest };  // of the fraction

// What is changed: the first element of a parameter that this world rank holds, or whose master it owns.
struct Flip {
  int rank = 0;
  std::string parameter;
  Place place = Place::kWeight;
  Bit bit = Bit::kLowest;
  int idle = 0;  // ranks that were launched before the world's and have no part in it
};

// Of an element in host or device memory.
inline void flip_bit(const Stream& stream, const Tensor& element, Bit bit) {
  const auto flip = [&](auto bits) {
    copy_across(stream, element, view_of(bits));
    auto* const bytes = reinterpret_cast<unsigned char*>(bits.data());
    bytes[bit == Bit::kLowest ? 0 : sizeof(bits[0]) - 2] ^= bit == Bit::kLowest ? 1 : 0x40;
    copy_across(stream, view_of(bits), element);
  };
  if (element.dtype() == DType::kBF16) return flip(std::vector<BF16>(1));
  flip(std::vector<float>(1));
}

// Whether this rank has such an element, which then is another one.
inline bool flip_on_this_rank(const TrainState& state, const Flip& flip) {
  const ParameterTable& table = state.parameters();
  std::vector<Range> runs;
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (parameter.name == flip.parameter) runs.push_back(elements);
  });
  if (runs.empty()) return false;
  if (flip.place == Place::kWeight) {
    flip_bit(state.stream(), table.flat_values().rows(runs.front().begin, runs.front().begin + 1), flip.bit);
    return true;
  }
  for (const AdamW::OwnState& own : state.optimizer().own_states()) {
    for (const Range& run : runs) {
      const Range both = intersect(own.elements, run);
      if (both.empty()) continue;
      const int64_t at = both.begin - own.elements.begin;
      flip_bit(state.stream(), own.master.rows(at, at + 1), flip.bit);
      return true;
    }
  }
  return false;
}

struct FlippedRun {
  int64_t steps = 0;    // when the comparison after them failed; 0: none did
  std::string message;  // the same on all ranks
  std::string hint;
  bool alike = true;     // all ranks ended at the same step with the same message
  bool flipped = false;  // the rank has such an element
};

// Trains six steps, comparing after every second one; the bit flips after `flip_after` of them.
inline FlippedRun train_flipped(Config config, const Layout& layout, DeviceType device, const std::optional<Flip>& flip,
                                int64_t flip_after = 2) {
  use_layout(config, layout);
  config.train.steps = 6;
  FlippedRun seen;
  std::mutex mutex;
  bool first = true;
  const int idle = flip ? flip->idle : 0;
  run_thread_ranks(idle + layout.topology().world(), [&](Communicator& job) {
    const std::shared_ptr<Communicator> thread_world = job.split(job.rank() < idle ? -1 : 0, 0, "world");
    if (thread_world == nullptr) return;
    Communicator& threads = *thread_world;
    const bool on_gpu = device == DeviceType::kCuda;
    const Stream stream = on_gpu ? make_cuda_stream(0) : Stream(DeviceType::kCpu);
    const std::unique_ptr<Communicator> staged = on_gpu ? make_staged_communicator(thread_world) : nullptr;
    Communicator& world = on_gpu ? *staged : threads;
    ProcessGroups groups = make_process_groups(world, layout.topology());
    MockRun run(config, groups, stream);
    CopyCheck copies(run.state, groups, 0);
    FlippedRun mine;
    for (int64_t step = 0; step < config.train.steps && mine.steps == 0; ++step) {
      if (flip && step == flip_after && world.rank() == flip->rank) mine.flipped = flip_on_this_rank(run.state, *flip);
      StepHooks hooks;
      hooks.gradients_complete = [&](const StepResult&) {
        copies.look();
        if (step % 2 == 1) copies.look_at_masters();
      };
      run.train(step, hooks);
      if ((step + 1) % 2 != 0) continue;
      copies.look();
      try {
        copies.compare(step + 1);
      } catch (const Error& error) {
        mine.steps = step + 1;
        mine.message = error.what();
        mine.hint = error.hint();
      }
    }
    const std::lock_guard lock(mutex);
    if (std::exchange(first, false)) seen = mine;
    seen.alike = seen.alike && seen.steps == mine.steps && seen.message == mine.message;
    seen.flipped = seen.flipped || mine.flipped;
  });
  return seen;
}

// The flip is found by the comparison after it, on all ranks, and told by this text.
inline void check_found(const Config& config, const Layout& layout, DeviceType device, const Flip& flip,
                        const std::string& told, int64_t flip_after = 2) {
  INFO(layout.topology().describe(layout.sequence) << ": " << flip.parameter << " of rank " << flip.rank);
  const FlippedRun run = train_flipped(config, layout, device, flip, flip_after);
  INFO("message: " << run.message);
  CHECK(run.flipped);
  CHECK(run.steps == 4);
  CHECK(run.alike);
  CHECK(contains(run.message, told));
  CHECK(contains(run.hint, "resume from a checkpoint of step 2 or before"));
}

inline Config copied_model(Precision precision, Reduction reduction) {
  Config config = grouped_qwen3(precision);  // two KV heads
  config.numerics.reduction = reduction;
  config.parallel.bucket_size = 4000;
  return config;
}

constexpr const char* kNorm = "model.layers.1.input_layernorm.weight";
constexpr const char* kKeys = "model.layers.0.self_attn.k_proj.weight";
constexpr const char* kUp = "model.layers.1.mlp.up_proj.weight";

// Every kind of copy, at layouts where the majority of ranks or no rank tells who is right.
inline void check_flips(DeviceType device) {
  const std::string norm = kNorm, keys = kKeys, up = kUp;
  for (const Reduction reduction : {Reduction::kFast, Reduction::kInvariant}) {
    const Config fp32 = copied_model(Precision::kF32, reduction), bf16 = copied_model(Precision::kBF16, reduction);
    // A norm that every rank has, on each of four ranks: of a replica, of four, of two by two.
    for (const int rank : {0, 1, 2, 3}) {
      std::string others;
      for (int other = 0; other < 4; ++other)
        others += other == rank ? "" : format("{}{}", others.empty() ? "" : ", ", other);
      const std::string told = format("{} on rank {} differs from that on ranks {}", norm, rank, others);
      check_found(fp32, {4, true, 1, 4}, device, {rank, norm}, told);
      check_found(bf16, {1, false, 4, 3}, device, {rank, norm}, told);
      if (rank == 3) check_found(bf16, {2, true, 2, 3}, device, {rank, norm}, told);
    }
    check_found(fp32, {1, false, 3, 4}, device, {.rank = 1, .parameter = norm, .idle = 2},
                norm + " on rank 3 differs from that on ranks 2, 4");
    check_found(fp32, {2, false, 1, 12}, device, {1, norm}, norm + " on rank 1 differs from that on rank 0");
    // KV heads that two of four tensor ranks have, of each data rank; a shard that data ranks have.
    check_found(bf16, {4, false, 2, 3}, device, {5, keys},
                keys + " (rows 0 to 3) on rank 5 differs from that on ranks 0, 1, 4");
    check_found(fp32, {2, true, 3, 2}, device, {4, up},
                up + " (rows 0 to 47) on rank 4 differs from that on ranks 0, 2");
    // Replicas of unequal widths: rows that ranks hold in pieces of other sizes.
    check_found(fp32, nonuniform({2, 1}, {6, 6}, true, 3), device, {2, norm},
                norm + " on rank 2 differs from that on ranks 0, 1");
    check_found(bf16, nonuniform({2, 1, 1}, {6, 3, 3}, true, 3), device, {0, up},
                up + " (rows 0 to 47) on rank 0 differs from that on ranks 2, 3");
    check_found(fp32, nonuniform({3, 2, 2}, {4, 4, 4}, true, 2), device, {6, up},
                " on rank 6 differs from that on ranks ");
    Config still = bf16;
    still.optimizer.lr = 0;
    // Masters are looked at in the compared step alone.
    check_found(still, {1, false, 2, 3}, device, {1, up, Place::kMaster, Bit::kHighest},
                up + " on rank 1 is not what its master weights round to", 3);
    // Without another copy than the master.
    check_found(bf16, {}, device, {0, up}, up + " on rank 0 is not what its master weights round to", 3);
  }
}

}  // namespace invar::test
