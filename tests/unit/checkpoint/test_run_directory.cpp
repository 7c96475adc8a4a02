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

TEST_CASE("What an interrupted save left is no checkpoint, and the next save removes it and says so") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 1);
  write_pending(directory, 2);
  for (const char* name : {"shard_00000.h5", "shard_123456.h5.tmp", "index.bin", "index.crc32"}) {
    folder.write(format("step_00000002.tmp/{}", name), "whole or not");
  }
  fs::create_directories(folder / "step_00000003.old");
  folder.write("notes.tmp", "not ours");
  folder.write("step_7/index.h5", "not ours");
  folder.write("step_7.tmp/index.h5", "not ours");
  CHECK(directory.steps() == std::vector<int64_t>{1});
  const CleanUp clean_up = directory.prepare(9);
  CHECK(contains(clean_up.done, "removed step_00000002.tmp"));
  CHECK(contains(clean_up.done, "removed step_00000003.old"));
  CHECK(clean_up.problems.empty());
  CHECK(!fs::exists(directory.pending_path_of(2)));
  CHECK(!fs::exists(folder / "step_00000003.old"));
  CHECK(fs::is_empty(directory.pending_path_of(9)));
  CHECK(fs::exists(folder / "notes.tmp"));
  CHECK(fs::exists(folder / "step_7"));
  CHECK(fs::exists(folder / "step_7.tmp"));
  CHECK(fs::exists(directory.path_of(1)));
}

TEST_CASE("A folder without an index stays, such as a checkpoint that is just being copied in") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 10);
  folder.write("step_00000005/shard_00000.h5", "its index comes later");
  folder.write("step_00000020/results.csv", "a person's work");
  CHECK(directory.steps() == std::vector<int64_t>{10});
  CHECK(directory.clean_up().done.empty());
  save(directory, 30);
  CHECK(directory.prune(30, 1, 0).done == "removed step_00000010");
  CHECK(directory.clean_up().done.empty());
  CHECK(folder.read("step_00000005/shard_00000.h5") == "its index comes later");
  CHECK(folder.read("step_00000020/results.csv") == "a person's work");
  folder.write("step_00000005/index.h5", "now it is whole");
  CHECK(directory.steps() == std::vector<int64_t>{5, 30});
}

TEST_CASE("A file under the name of what an interrupted save leaves is a person's own, and stays") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  for (const char* name : {"step_00000007.tmp", "step_00000009.old"}) folder.write(name, "precious");
  const CleanUp cleaned = directory.clean_up();
  CHECK(cleaned.done.empty());
  CHECK(contains(cleaned.problems, "step_00000007.tmp stays: "));
  CHECK(folder.read("step_00000007.tmp") == "precious");
  CHECK(folder.read("step_00000009.old") == "precious");
}

TEST_CASE("Nothing is removed that holds anything but invar's own files") {
  for (const char* name : {"results.csv", "shard_1.h5", "shard_00001.h5.old", "index.h5.bak", "more/index.h5"}) {
    INFO(name);
    const TemporaryFolder folder;
    const RunDirectory directory(folder.path());
    for (const char* kept : {"step_00000001", "step_00000002.tmp", "step_00000003.old"}) {
      folder.write(format("{}/index.h5", kept), "index");
      folder.write(format("{}/{}", kept, name), "a person's work");
    }
    fs::create_directory(directory.path_of(3));
    folder.write("step_00000003/index.h5", "index");
    save(directory, 4);
    const CleanUp pruned = directory.prune(4, 1, 0), cleaned = directory.clean_up();
    CHECK(pruned.done == "removed step_00000003");
    CHECK(contains(pruned.problems, "step_00000001 stays: "));
    CHECK(contains(cleaned.problems, "step_00000002.tmp stays: "));
    for (const char* kept : {"step_00000001", "step_00000002.tmp"}) {
      CHECK(folder.read(format("{}/{}", kept, name)) == "a person's work");
      CHECK(folder.read(format("{}/index.h5", kept)) == "index");
    }
  }
}

TEST_CASE("What lies in the way of a save moves to a free name, and the save goes on") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  folder.write("step_00000002.tmp/results.csv", "first");
  CHECK(
      contains(directory.prepare(2).problems, "step_00000002.tmp was in the way of a save and is step_00000002.tmp.1"));
  CHECK(fs::is_empty(directory.pending_path_of(2)));
  folder.write("step_00000002.tmp/results.csv", "second");
  CHECK(contains(directory.prepare(2).problems, "step_00000002.tmp.2"));
  CHECK(folder.read("step_00000002.tmp.1/results.csv") == "first");
  CHECK(folder.read("step_00000002.tmp.2/results.csv") == "second");

  save(directory, 3, "older");
  folder.write("step_00000003.old", "a person's work");
  write_pending(directory, 3, "newer");
  CHECK(contains(directory.publish(3).problems, "step_00000003.old.1"));
  CHECK(folder.read("step_00000003/index.h5") == "newer");
  CHECK(folder.read("step_00000003.old.1") == "a person's work");

  folder.write("step_00000004", "no folder");
  folder.write("step_00000005/shard_00000.h5", "just being copied in");
  fs::create_directory_symlink("archive that is not mounted", folder / "step_00000006");
  for (const int64_t step : {4, 5, 6}) save(directory, step);
  CHECK(!fs::exists(folder / "step_00000003.old"));
  CHECK(directory.steps() == std::vector<int64_t>{3, 4, 5, 6});
  CHECK(folder.read("step_00000004.1") == "no folder");
  CHECK(folder.read("step_00000005.1/shard_00000.h5") == "just being copied in");
  CHECK(fs::is_symlink(folder / "step_00000006.1"));
}

TEST_CASE("Checkpoints that cannot be read do not count as none") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  const auto refused = [&](const std::string& name) {
    require_error(ErrorKind::kData, {name}, {"readable"}, [&] { (void)directory.latest(); });
  };
  CHECK(!RunDirectory(folder / "nowhere").latest());
  CHECK(!directory.latest());
  fs::create_directory(folder / "latest");
  refused("latest: not a regular file");
  fs::remove(folder / "latest");
  fs::create_symlink("latest", folder / "latest");  // a loop: the system's error is neither ENOENT nor ENOTDIR
  refused("latest: cannot be looked at: Too many levels of symbolic links");
  fs::remove(folder / "latest");
  fs::create_symlink("step_00000001", folder / "step_00000001");
  refused("step_00000001: cannot be looked at");
  fs::remove(folder / "step_00000001");
  fs::create_directory(folder / "step_00000001");
  fs::create_symlink("index.h5", folder / "step_00000001/index.h5");
  refused("step_00000001/index.h5: cannot be looked at");
  folder.write("latest", "step_00000001\n");
  refused("step_00000001/index.h5: cannot be looked at");
  require_error(ErrorKind::kData, {"step_00000001/index.h5"}, [&] { (void)find_checkpoint(folder.path()); });
  fs::remove(folder / "latest");
  fs::remove_all(folder / "step_00000001");
  fs::create_directory_symlink("archive that is not mounted", folder / "step_00000001");
  refused("step_00000001: is a link to what is not there");
  fs::create_directory_symlink("loop", folder / "loop");
  require_error(ErrorKind::kData, {"loop/latest: cannot be looked at"},
                [&] { (void)RunDirectory(folder / "loop").latest(); });
  // And nothing of that is removed or put back.
  CHECK(directory.clean_up().done.empty());
  CHECK(fs::is_symlink(folder / "step_00000001"));
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
    const FolderLock lock = directory.lock();
    CHECK(lock);
    require_error(ErrorKind::kConfig, {"run/checkpoints", "another run"},
                  [&] { directory.lock(std::chrono::milliseconds(1)); });
  }
  CHECK(directory.lock());
  folder.write("file", "x");
  require_error(ErrorKind::kConfig, {"file/checkpoints"}, [&] { RunDirectory(folder / "file/checkpoints").lock(); });
}

TEST_CASE("A step that is saved again takes the place of the first") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  save(directory, 5, "first");
  save(directory, 5, "second");
  CHECK(read_file(directory.path_of(5) / "index.h5") == "second");
  CHECK(directory.clean_up().done == "removed step_00000005.old");
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
  CHECK(directory.prune(2, 1, 0).problems.empty());
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

TEST_CASE("A run that begins anew sets the checkpoints of an earlier one aside") {
  const TemporaryFolder folder;
  const RunDirectory directory(folder.path());
  CHECK(directory.set_aside().done.empty());
  save(directory, 10, "first");
  save(directory, 20, "first");
  folder.write("latest", "step_00000010\n");
  fs::create_directory(directory.path_of(30));  // just being copied in
  CHECK(directory.set_aside().done.find("earlier.1") != std::string::npos);
  CHECK(directory.steps().empty());
  CHECK(!directory.latest());
  CHECK(fs::exists(directory.path_of(30)));
  CHECK(find_checkpoint(folder / "earlier.1") == folder / "earlier.1/step_00000010");

  save(directory, 10, "second");
  CHECK(directory.set_aside().done.find("earlier.2") != std::string::npos);
  CHECK(read_file(folder / "earlier.1/step_00000010/index.h5") == "first");
  CHECK(read_file(folder / "earlier.2/step_00000010/index.h5") == "second");
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
