#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "core/error.h"
#include "observe/log.h"
#include "support/catch.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

// What the action writes to this process's standard output.
template <class Action>
std::string console_of(const TemporaryFolder& folder, Action action) {
  std::fflush(stdout);
  const int saved = ::dup(STDOUT_FILENO);
  std::FILE* file = std::fopen((folder / "console").c_str(), "wb");
  ::dup2(::fileno(file), STDOUT_FILENO);
  action();
  std::fflush(stdout);
  ::dup2(saved, STDOUT_FILENO);
  ::close(saved);
  std::fclose(file);
  return read_file(folder / "console");
}

// The lines of a log file; the time in front of each is checked and taken off.
std::vector<std::string> log_lines(const std::filesystem::path& run) {
  constexpr std::string_view kTime = "0000-00-00 00:00:00.000 | ";
  std::ifstream stream(run / "log.txt");
  std::vector<std::string> result;
  for (std::string line; std::getline(stream, line);) {
    std::string time = line.substr(0, kTime.size());
    std::replace_if(
        time.begin(), time.end(), [](char c) { return '0' <= c && c <= '9'; }, '0');
    REQUIRE(time == kTime);
    result.push_back(line.substr(kTime.size()));
  }
  return result;
}

void say_all(Log& log) {
  log.info("step 1 of {} %v");  // no placeholder of any kind
  log.warn("low disk");
  log.error("no disk");
}

}  // namespace

TEST_CASE("Rank 0 logs to the console and to the file") {
  const TemporaryFolder folder;
  const auto run = folder / "runs/first";
  const std::string console = console_of(folder, [&] {
    Log log(0, run);
    say_all(log);
    CHECK(log_lines(run).size() == 3);  // on disk while the log is open
  });
  CHECK(console == "step 1 of {} %v\nwarning: low disk\n");
  CHECK(log_lines(run) == std::vector<std::string>{"rank 0 | info | step 1 of {} %v", "rank 0 | warning | low disk",
                                                   "rank 0 | error | no disk"});
}

TEST_CASE("Other ranks add their warnings and errors to the file and leave the console alone") {
  const TemporaryFolder folder;
  const std::string console = console_of(folder, [&] {
    Log first(0, folder.path());
    Log other(3, folder.path());
    first.info("before");
    say_all(other);
    first.info("after");
  });
  CHECK(console == "before\nafter\n");
  CHECK(log_lines(folder.path()) == std::vector<std::string>{"rank 0 | info | before", "rank 3 | warning | low disk",
                                                             "rank 3 | error | no disk", "rank 0 | info | after"});
}

TEST_CASE("Ranks are named in the file as they were launched") {
  const TemporaryFolder folder;
  const std::string console = console_of(folder, [&] {
    Log(0, folder.path(), 1).info("of the first that trains");
    Log(1, folder.path(), 3).warn("of another");
  });
  CHECK(console == "of the first that trains\n");
  CHECK(log_lines(folder.path()) ==
        std::vector<std::string>{"rank 1 | info | of the first that trains", "rank 3 | warning | of another"});
}

TEST_CASE("Only the first rank removes a torn last line: what others see as one may be a line that is being written") {
  const TemporaryFolder folder;
  const auto path = folder / "log.txt";
  write_file(path, "whole\ntorn");
  Log other(1, folder.path());
  CHECK(std::filesystem::file_size(path) == 10);
  Log first(0, folder.path());
  CHECK(std::filesystem::file_size(path) == 6);
}

TEST_CASE("A later log appends; without a folder there is no file") {
  const TemporaryFolder folder;
  console_of(folder, [&] {
    Log(0, folder.path()).info("first run");
    Log(0, folder.path()).info("resumed");
    Log(0, "").info("console only");
    Log(1, "").error("nowhere");
  });
  CHECK(log_lines(folder.path()) == std::vector<std::string>{"rank 0 | info | first run", "rank 0 | info | resumed"});
}

TEST_CASE("A log file that cannot be opened is an error with its name") {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  require_error(ErrorKind::kConfig, {"log.dir: ", "file/log.txt: its folder cannot be created: Not a directory"},
                [&] { Log log(1, folder / "file"); });
  std::filesystem::create_directories(folder / "run/log.txt");
  require_error(ErrorKind::kConfig, {"log.txt: cannot be opened: Is a directory"}, [&] { Log log(1, folder / "run"); });
  REQUIRE(::mkfifo((folder / "log.txt").c_str(), 0644) == 0);
  require_error(ErrorKind::kConfig, {"log.txt: is a pipe"}, [&] { Log log(1, folder.path()); });
}

TEST_CASE("A full disk under the log is told once on the console, with its reason") {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "log.txt");
  const std::string console = console_of(folder, [&] {
    Log log(0, folder.path());
    log.info("one");
    log.info("two");
  });
  CHECK(console == "one\nwarning: " + (folder / "log.txt").string() +
                       ": cannot be written: No space left on device; the run goes on\ntwo\n");
}

TEST_CASE("A console that cannot be written is told once in the file, with its reason, and what follows is there too") {
  const TemporaryFolder folder;
  const int saved = ::dup(STDOUT_FILENO);
  const int full = ::open("/dev/full", O_WRONLY);
  ::dup2(full, STDOUT_FILENO);
  {
    Log log(0, folder.path());
    log.info("one");
    log.info("two");
  }
  ::dup2(saved, STDOUT_FILENO);
  ::close(full);
  ::close(saved);
  CHECK(log_lines(folder.path()) ==
        std::vector<std::string>{"rank 0 | info | one",
                                 "rank 0 | warning | standard output: cannot be written: No space left on device; the "
                                 "run goes on without its console",
                                 "rank 0 | info | two"});
}
