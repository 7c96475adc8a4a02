// A rank whose copy of a weight is another one is named, on the CPU; tests/gpu/test_copies.cpp does it on a GPU.
#include "checkpoint/run_directory.h"
#include "copies_case.h"
#include "support/temporary_folder.h"
#include "support/wrapped_communicator.h"
#include "train/trainer.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("one bit of one rank's copy is named by the next comparison, with tensor and ranks") {
  check_flips(DeviceType::kCpu);
}

TEST_CASE("a change right after a comparison, or right before the next one, is found by that") {
  const Config config = copied_model(Precision::kF32, Reduction::kFast);
  const Layout data_ranks{1, false, 4, 3};
  for (const int64_t after : {2, 3}) {  // of which the values are sent anew after each step
    const FlippedRun run = train_flipped(config, data_ranks, DeviceType::kCpu, Flip{2, kNorm}, after);
    CHECK(run.steps == 4);
    CHECK(contains(run.message, "on rank 2 differs from that on ranks 0, 1, 3"));
  }
}

TEST_CASE("masters are read at compared steps alone: a weight with no other copy is right again after an update") {
  const Config config = copied_model(Precision::kBF16, Reduction::kFast);
  CHECK(train_flipped(config, {}, DeviceType::kCpu, Flip{0, kUp}, 2).steps == 0);
  CHECK(train_flipped(config, {}, DeviceType::kCpu, Flip{0, kUp}, 3).steps == 4);
}

TEST_CASE("control: without a change no comparison fails") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (const Reduction reduction : {Reduction::kFast, Reduction::kInvariant}) {
      for (const Layout& layout :
           {Layout{4, true, 2, 3}, Layout{8, false, 1, 4}, nonuniform({4, 3, 2}, {6, 4, 2}, true, 2)}) {
        CHECK(train_flipped(copied_model(precision, reduction), layout, DeviceType::kCpu, {}).steps == 0);
      }
    }
  }
}

namespace {

// Changes a value that a rank has received, once: in its all_gather number `which`.
class BadGather : public WrappedCommunicator {
 public:
  BadGather(std::unique_ptr<Communicator> inner, int which) : WrappedCommunicator(std::move(inner)), left_(which) {}

  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) override {
    WrappedCommunicator::all_gather(stream, send, receive, counts);
    if (receive.dtype() != DType::kF32 || left_-- != 0) return;
    const int64_t other = send.raw() == receive.raw() ? receive.numel() - 1 : 0;  // not of this rank's own
    flip_bit(stream, receive.rows(other, other + 1), Bit::kLowest);
  }

 private:
  int left_;
};

constexpr int kStep4 = 6, kStep6 = 10;  // the first all_gather of a step, which has two

// What the four data ranks of a run say that ends with an error. Rank 2 receives another value in one all_gather.
std::vector<std::string> train_with_bad_gather(const TemporaryFolder& folder, int64_t hash_every, int64_t save_every,
                                               int which) {
  Config config = copied_model(Precision::kF32, Reduction::kFast);
  const Layout layout{1, false, 4, 3};
  use_layout(config, layout);
  config.parallel.bucket_size = 1 << 20;  // two buckets, norms and the rest, with an exchange each
  config.train.steps = 9;
  config.train.eval_every = 0;
  config.log.hash_every = hash_every;
  config.log.dir = folder.path().string();
  config.checkpoint.every = save_every;
  config.checkpoint.keep = 1;
  std::vector<std::string> said(4);
  run_thread_ranks(4, [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, layout.topology());
    if (world.rank() == 2) groups.holders = std::make_unique<BadGather>(std::move(groups.holders), which);
    StopControl stop(config.train, nullptr);
    Log log(world.rank(), folder.path());
    const std::optional<Error> error =
        error_of([&] { Trainer(config, groups, Stream(DeviceType::kCpu), stop).run(log); });
    if (error) said[static_cast<size_t>(world.rank())] = format("{} ({})", error->what(), error->hint());
  });
  for (const std::string& text : said) CHECK(contains(text, " on rank 2 differs from that on ranks 0, 1, 3"));
  return said;
}

}  // namespace

TEST_CASE("a run with log.hash_every ends with the tensor and the rank whose new values went wrong") {
  const TemporaryFolder folder;
  for (const std::string& text : train_with_bad_gather(folder, 3, 0, kStep4)) {
    CHECK(contains(text, "step 6: copies of the state differ: "));
    CHECK(contains(text, "checkpoint of step 3 or before"));
  }
  CHECK(contains(folder.read("metrics.jsonl"), "\"step\":5,"));
  CHECK(!contains(folder.read("metrics.jsonl"), "\"step\":6,"));
}

TEST_CASE("a copy that differs ends the run before a save, and the checkpoint before it stays") {
  // Before the next hashed step, or without any: then what a save itself finds.
  for (const auto& [hash_every, which] : {std::pair(9, kStep4), std::pair(0, kStep6)}) {
    const TemporaryFolder folder;
    for (const std::string& text : train_with_bad_gather(folder, hash_every, 3, which)) {
      CHECK(contains(text, "step 6: no checkpoint of step 6 is written: copies of the state differ: "));
      CHECK(contains(text, "checkpoint of step 3 or before"));
    }
    CHECK(RunDirectory(folder / "checkpoints").steps() == std::vector<int64_t>{3});
    CHECK(folder.read("checkpoints/latest") == "step_00000003\n");
  }
}
