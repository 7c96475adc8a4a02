#include "checkpoint/run_directory.h"

#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;
namespace fs = std::filesystem;

namespace {

// As a save leaves it, before publish().
void write_pending(const RunDirectory& directory, int64_t step, const std::string& content = "index") {
  directory.prepare(step);
  write_file(directory.pending_path_of(step) / "index.h5", content);
}

void save(const RunDirectory& directory, int64_t step, const std::string& content = "index") {
  write_pending(directory, step, content);
  directory.publish(step);
}

}  // namespace

TEST_CASE("The latest checkpoint is the one published last, whatever its number") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder / "checkpoints");
  CHECK(!directory.latest());
  save(directory, 100);
  save(directory, 200);
  CHECK(directory.latest() == directory.path_of(200));
  save(directory, 50);
  CHECK(directory.latest() == folder / "checkpoints/step_00000050");
  CHECK(read_file(folder / "checkpoints/latest") == "step_00000050\n");
  CHECK(directory.steps() == std::vector<int64_t>{50, 100, 200});
}

TEST_CASE("Without `latest` the newest complete checkpoint counts; a name that is not there is refused") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 1);
  save(directory, 20);
  fs::remove(folder / "latest");
  CHECK(directory.latest() == directory.path_of(20));
  fs::remove(directory.path_of(20) / "index.h5");
  CHECK(directory.latest() == directory.path_of(1));
  save(directory, 2);
  folder.write("latest", "step_00000009\n");
  require_error(ErrorKind::kData, {"latest", "step_00000009"}, [&] { directory.latest(); });
  folder.write("latest", "../elsewhere\n");
  require_error(ErrorKind::kData, {"latest", "elsewhere"}, [&] { directory.latest(); });
}

TEST_CASE("What an interrupted save left is no checkpoint, and the next save removes it") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 1);
  write_pending(directory, 2);
  fs::create_directories(folder / "step_00000003.old");
  folder.write("step_00000005/shard_00000.h5", "a removal that was interrupted");
  folder.write("notes.tmp", "not ours");
  folder.write("step_7/index.h5", "not ours");
  CHECK(directory.steps() == std::vector<int64_t>{1});
  directory.prepare(9);
  CHECK(!fs::exists(directory.pending_path_of(2)));
  CHECK(!fs::exists(folder / "step_00000003.old"));
  CHECK(!fs::exists(folder / "step_00000005"));
  CHECK(fs::is_empty(directory.pending_path_of(9)));
  CHECK(fs::exists(folder / "notes.tmp"));
  CHECK(fs::exists(folder / "step_7"));
  CHECK(fs::exists(directory.path_of(1)));
}

TEST_CASE("A checkpoint that was moved aside for another, which never came, is still there") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 1);
  save(directory, 2);
  fs::rename(directory.path_of(2), folder / "step_00000002.old");
  CHECK(directory.latest() == folder / "step_00000002.old");
  directory.prepare(3);
  CHECK(directory.latest() == directory.path_of(2));
}

TEST_CASE("One process at a time saves into a folder") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder / "run/checkpoints");
  {
    const RunDirectory::Lock lock = directory.lock();
    CHECK(lock);
    require_error(ErrorKind::kConfig, {"run/checkpoints", "another run"},
                  [&] { directory.lock(std::chrono::milliseconds(1)); });
  }
  CHECK(directory.lock());
  folder.write("file", "x");
  require_error(ErrorKind::kFault, {"file/checkpoints"}, [&] { RunDirectory(folder / "file/checkpoints").lock(); });
}

TEST_CASE("A step that is saved again takes the place of the first") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 5, "first");
  save(directory, 5, "second");
  CHECK(read_file(directory.path_of(5) / "index.h5") == "second");
  CHECK(directory.clean_up().empty());
  CHECK(!fs::exists(directory.path_of(5).string() + ".old"));
}

TEST_CASE("Pruning keeps the newest, the multiples of keep_every, and what `latest` names") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  for (const int64_t step : {10, 20, 30, 40, 50, 60}) save(directory, step);
  directory.prune(60, 2, 30);
  CHECK(directory.steps() == std::vector<int64_t>{30, 50, 60});
  folder.write("latest", "step_00000030\n");
  directory.prune(60, 1, 0);
  CHECK(directory.steps() == std::vector<int64_t>{30, 60});
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.path())) {
    CHECK(!contains(entry.path().string(), ".old"));
  }
}

TEST_CASE("Of a checkpoint that is kept elsewhere only the link is removed") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder / "c");
  save(directory, 1);
  fs::rename(directory.path_of(1), folder / "archive");
  fs::create_directory_symlink(folder / "archive", directory.path_of(1));
  save(directory, 2);
  CHECK(directory.prune(2, 1, 0).empty());
  CHECK(directory.steps() == std::vector<int64_t>{2});
  CHECK(fs::exists(folder / "archive/index.h5"));
}

TEST_CASE("A run that went back does not count the checkpoints ahead of it") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  for (const int64_t step : {10, 20, 100, 200, 30}) save(directory, step);
  directory.prune(30, 1, 0);
  CHECK(directory.steps() == std::vector<int64_t>{30, 100, 200});
}

TEST_CASE("A path means a checkpoint, a folder of them, or a run") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder / "run/checkpoints");
  save(directory, 1);
  save(directory, 2);
  CHECK(find_checkpoint(directory.path_of(1)) == directory.path_of(1));
  CHECK(find_checkpoint(folder / "run/checkpoints") == directory.path_of(2));
  CHECK(find_checkpoint(folder / "run") == directory.path_of(2));
  CHECK(find_checkpoint(directory.path_of(1).string() + "/") == directory.path_of(1));
  CHECK(find_checkpoint(folder / "run/../run//") == directory.path_of(2));
  require_error(ErrorKind::kData, {"neither a checkpoint"}, [&] { find_checkpoint(folder.path()); });
  require_error(ErrorKind::kData, {"nowhere"}, [&] { find_checkpoint(folder / "nowhere"); });
}

TEST_CASE("A folder that cannot be made is told with its name") {
  const TemporaryFolder folder;
  folder.write("file", "x");
  require_error(ErrorKind::kFault, {"file/checkpoints"}, [&] { RunDirectory(folder / "file/checkpoints").prepare(1); });
}
