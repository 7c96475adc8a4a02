#include "checkpoint/checkpoint_saver.h"

#include <new>

#include "checkpoint/checkpoint_reader.h"
#include "comm/thread_communicator.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"

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

}  // namespace

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
