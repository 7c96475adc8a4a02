#include "checkpoint/checkpoint_saver.h"

#include <new>

#include "checkpoint/checkpoint_reader.h"
#include "comm/thread_communicator.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"
#include "support/wrapped_communicator.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int kRanks = 3;

// Row `rank` of a tensor with a row per rank.
StatePart part_of(int rank, std::vector<float>& row) {
  StatePart part;
  part.tensors.resize(1);
  part.tensors[0].name = "model/x";
  part.tensors[0].shape = {kRanks, std::ssize(row)};
  part.runs = {{0, {rank, rank + 1}, row.data()}};
  return part;
}

// Says another first number than its rank has, in the call that `of` names.
class Misreporting : public WrappedCommunicator {
 public:
  enum class Of : uint8_t { kSize, kShard };
  Misreporting(std::unique_ptr<Communicator> inner, Of of, int64_t number)
      : WrappedCommunicator(std::move(inner)), of_(of), number_(number) {}

  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) override {
    if (of_ == Of::kSize) send.data<int64_t>()[0] = number_;
    WrappedCommunicator::all_gather(stream, send, receive, counts);
  }
  void send(const Stream& stream, const Tensor& buffer, int to) override {
    if (of_ == Of::kShard) buffer.data<int64_t>()[0] = number_;
    WrappedCommunicator::send(stream, buffer, to);
  }

 private:
  Of of_;
  int64_t number_;
};

// How the save of two ranks fails of which rank 1 misreports, and that the next one is whole.
void check_misreported(Misreporting::Of of, int64_t number, const std::string& failure) {
  const TemporaryFolder folder;
  run_thread_ranks(2, [&](Communicator& world) {
    std::vector<float> row(10, 1.0f);
    const auto give = [&] {
      StatePart part = part_of(world.rank(), row);
      part.tensors[0].shape[0] = 2;
      return part;
    };
    const Stream stream(DeviceType::kCpu);
    const auto save = [&](Communicator& ranks, int64_t step) {
      CheckpointSaver saver(ranks, stream, folder.path(), {});
      CheckpointInfo info;
      info.step = step;
      (void)saver.save(info, give);
      return saver.wait().value().failure;
    };
    std::unique_ptr<Communicator> part = world.split(0, world.rank(), "ranks");
    if (world.rank() == 1) part = std::make_unique<Misreporting>(std::move(part), of, number);
    const std::string failed = save(*part, 1), whole = save(world, 2);
    CHECK(failed == failure);
    CHECK(whole.empty());
  });
  CHECK(RunDirectory(folder.path()).steps() == std::vector<int64_t>{2});
}

}  // namespace

TEST_CASE("Rank 0, when it cannot make the index of what ranks say, makes the save fail on all") {
  check_misreported(Misreporting::Of::kShard, int64_t{1} << 40,
                    "rank 0: what another rank says of its shard is wrong: the number 1099511627776 is out of range");
}

TEST_CASE("A rank without memory for its copy makes the save fail on all, and the next one is whole") {
  for (const bool async : {true, false}) {
    const TemporaryFolder folder;
    run_thread_ranks(kRanks, [&](Communicator& world) {
      std::vector<float> row(10, static_cast<float>(world.rank()));
      const auto give = [&] { return part_of(world.rank(), row); };
      const Stream stream(DeviceType::kCpu);
      CheckpointSaver saver(world, stream, folder.path(), {.async = async});
      CheckpointInfo info;
      info.step = 1;
      (void)saver.save(info, [&]() -> StatePart {
        if (world.rank() == 1) throw std::bad_alloc();  // as a copy from a GPU may
        return give();
      });
      const SaveResult failed = saver.wait().value();
      CHECK(failed.failure == "rank 1: no memory left to write it");
      info.step = 2;
      (void)saver.save(info, give);
      const SaveResult whole = saver.wait().value();
      CHECK(whole.failure.empty());
    });
    CHECK(RunDirectory(folder.path()).steps() == std::vector<int64_t>{2});
    CHECK(!std::filesystem::exists(RunDirectory(folder.path()).pending_path_of(1)));
    std::vector<float> found(10);
    CheckpointReader(RunDirectory(folder.path()).path_of(2)).read_rows("model/x", {2, 3}, found);
    CHECK(found == std::vector<float>(10, 2.0f));
  }
}

// The address sanitizer ends the program where a machine would only say no.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("Rank 0 without memory for what the others wrote makes the save fail on all") {
  check_misreported(Misreporting::Of::kSize, int64_t{1} << 45, "rank 0: no memory left to write it");
}

TEST_CASE("A copy that no memory holds is told with its bytes and the rank") {
  const TemporaryFolder folder;
  run_thread_ranks(2, [&](Communicator& world) {
    const Stream stream(DeviceType::kCpu);
    CheckpointSaver saver(world, stream, folder.path(), {});
    CheckpointInfo info;
    (void)saver.save(info, [&] {
      std::vector<float> row(10);
      StatePart part = part_of(0, row);
      if (world.rank() == 1) {  // more than there are addresses; its values are never looked at
        part.tensors[0].shape = {int64_t{1} << 45, 1};
        part.runs = {{0, {0, int64_t{1} << 45}, nullptr}};
      }
      return part;
    });
    const std::string failure = saver.wait().value().failure;
    CHECK(contains(failure, "rank 1: no memory for a copy of this rank's state: 140737488355328 bytes"));
    CHECK(contains(failure, "checkpoint.async: false"));
  });
}
#endif
