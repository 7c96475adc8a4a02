#include "train/run_outputs.h"

#include <climits>

#include "support/catch.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("an earlier run's files get one number, the first that is free for all of them") {
  const TemporaryFolder folder;
  CHECK(keep_earlier_run(folder.path()).empty());
  CHECK(keep_earlier_run(folder / "absent").empty());
  write_file(folder / "metrics.1.jsonl", "first");
  write_file(folder / "metrics.jsonl", "second");
  write_file(folder / "config.yaml", "config");
  write_file(dump_path(folder.path(), 3), "dump");
  write_file(block_hashes_path(folder.path(), 123456789), "hashes");
  for (const char* other : {"log.txt", "notes.yaml", "dump_step_.h5", "dump_step_x.h5", "dump_step_3.1.h5"}) {
    write_file(folder / other, other);
  }
  CHECK(keep_earlier_run(folder.path()) ==
        "an earlier run in " + folder.path().string() +
            " is kept as config.2.yaml, dump_step_00000003.2.h5, hash_step_123456789.2.h5, metrics.2.jsonl");
  CHECK(folder.read("metrics.1.jsonl") == "first");
  CHECK(folder.read("metrics.2.jsonl") == "second");
  CHECK(folder.read("config.2.yaml") == "config");
  CHECK_FALSE(std::filesystem::exists(folder / "metrics.jsonl"));
  for (const char* other : {"log.txt", "notes.yaml", "dump_step_.h5", "dump_step_x.h5", "dump_step_3.1.h5"}) {
    CHECK(folder.read(other) == other);
  }
  CHECK(keep_earlier_run(folder.path()).empty());
}

// Numbers are tried until a name is free: a name that cannot be looked at must not count as taken for ever.
TEST_CASE("a folder in which no number can be tried is an error with the name") {
  const TemporaryFolder folder;
  constexpr size_t kLongest = PATH_MAX - 1;
  const std::string file = "/config.yaml";
  std::string path = folder.path().string();
  while (path.size() + file.size() < kLongest) {
    const size_t left = kLongest - file.size() - path.size();
    path += "/" + std::string(left > 300 ? 200 : left > 200 ? 100 : left - 1, 'd');
  }
  REQUIRE(path.size() + file.size() == kLongest);  // config.1.yaml is too long a path
  std::filesystem::create_directories(path);
  write_file(path + file, "config");
  require_error(ErrorKind::kFault, {"config.1.yaml: cannot be looked for: File name too long"},
                [&] { keep_earlier_run(path); });
  CHECK(std::filesystem::exists(path + file));
}
