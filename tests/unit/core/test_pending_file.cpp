#include "core/pending_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "core/folder_lock.h"
#include "support/catch.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;
using namespace std::chrono_literals;

TEST_CASE("a temporary file never goes through a link that somebody put there") {
  const TemporaryFolder folder;
  write_file(folder / "victim", "precious");
  std::filesystem::create_symlink(folder / "victim", folder / "new.tmp");
  write_text_file(folder / "new", "text");
  CHECK(folder.read("victim") == "precious");
  CHECK(folder.read("new") == "text");
  CHECK(std::filesystem::is_regular_file(std::filesystem::symlink_status(folder / "new")));
}

TEST_CASE("what a killed process left, or a pipe, in the place of a temporary file is removed") {
  const TemporaryFolder folder;
  write_file(folder / "new.tmp", "left over, and longer");
  write_text_file(folder / "new", "text");
  CHECK(folder.read("new") == "text");
  REQUIRE(::mkfifo((folder / "new.tmp").c_str(), 0644) == 0);
  write_text_file(folder / "new", "again");
  CHECK(folder.read("new") == "again");
  std::filesystem::create_directory(folder / "new.tmp");
  require_error(ErrorKind::kFault, {"new.tmp: cannot be created: Is a directory"},
                [&] { write_text_file(folder / "new", "text"); });
}

TEST_CASE("of two writers of one file, the one whose temporary file is gone says so and publishes nothing") {
  const TemporaryFolder folder;
  PendingFile first(folder / "new");
  {
    PendingFile second(folder / "new");
    require_error(ErrorKind::kFault, {"new.tmp: another process removed or replaced it"}, [&] { first.publish(); });
    CHECK_FALSE(std::filesystem::exists(folder / "new"));
    second.publish();
  }
  CHECK(std::filesystem::exists(folder / "new"));
}

TEST_CASE("a folder is locked by one at a time, and its lock is no way to another file") {
  const TemporaryFolder folder;
  const auto lock = [&](const char* name) { return lock_folder(folder / name, "in use", "wait", 0ms); };
  {
    const FolderLock first = lock("run");
    require_error(ErrorKind::kConfig, {"run: in use"}, {"wait"}, [&] { (void)lock("run"); });
    CHECK(lock("other"));
  }
  CHECK(lock("run"));
  write_file(folder / "file", "");
  require_error(ErrorKind::kConfig, {"file/run: cannot be made: Not a directory"}, [&] { (void)lock("file/run"); });
  std::filesystem::create_directory(folder / "linked");
  std::filesystem::create_symlink(folder / "absent", folder / "linked/lock");
  require_error(ErrorKind::kConfig, {"linked/lock: cannot be created"}, [&] { (void)lock("linked"); });
  CHECK_FALSE(std::filesystem::exists(folder / "absent"));
}
