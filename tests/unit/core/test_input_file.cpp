#include "core/input_file.h"

#include <sys/stat.h>

#include "core/presence.h"
#include "support/bytes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("an input file gives its bytes, and numbers at any offset") {
  const TemporaryFolder folder;
  const std::string bytes = "x" + bytes_of<int32_t>({-7, 1 << 30}) + bytes_of<uint64_t>({~uint64_t{1}});
  const std::string path = folder.write("a.bin", bytes);
  InputFile first(path);
  const InputFile file = std::move(first);
  CHECK(file.path() == path);
  CHECK(file.size() == 17);
  std::string whole(17, '\0');
  file.read_at(0, std::span(whole));
  CHECK(whole == bytes);
  CHECK(file.value<char>(0) == 'x');
  CHECK(file.value<int32_t>(1) == -7);
  CHECK(file.value<int32_t>(5) == 1 << 30);
  CHECK(file.value<uint64_t>(9) == ~uint64_t{1});
  file.read_at(17, std::span<std::byte>());
  for (const int64_t offset : {int64_t{-1}, int64_t{14}, int64_t{17}, std::numeric_limits<int64_t>::max()}) {
    require_error(ErrorKind::kFault, {"a.bin: bytes " + std::to_string(offset)}, [&] { file.value<int32_t>(offset); });
  }
}

TEST_CASE("a file that cannot be opened is refused with path, reason and the caller's hint, and nothing blocks") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::filesystem::path& path, const std::string& reason) {
    for (const ErrorKind kind : {ErrorKind::kData, ErrorKind::kConfig}) {
      require_error(kind, {path.string() + ": " + reason}, {"check data.path"},
                    [&] { InputFile(path.string(), "check data.path", kind); });
    }
  };
  refused(folder / "none.bin", "cannot be opened: No such file or directory");
  refused(folder.path(), "not a regular file");
  refused("/dev/null", "not a regular file");
  const std::filesystem::path pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  refused(pipe, "not a regular file");
}

TEST_CASE("a file that shrinks after it was opened ends a read with its size then and now") {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.bin", std::string(1000, 'x'));
  const InputFile file(path);
  std::filesystem::resize_file(path, 600);
  std::string some(500, '\0');
  file.read_at(100, std::span(some));
  require_error(ErrorKind::kData, {path + ": the file has shrunk: 1000 bytes when it was opened, 600 now"}, {"restore"},
                [&] { file.read_at(101, std::span(some)); });
}

TEST_CASE("a text file is read whole, up to a limit") {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", "1234567");
  CHECK(read_text_file(path, 7) == "1234567");
  CHECK(read_text_file(folder.write("empty.txt", ""), 0).empty());
  require_error(ErrorKind::kData, {path + ": 7 bytes, where at most 6"}, [&] { read_text_file(path, 6); });
}

TEST_CASE("Missing is what does not exist; what cannot be looked at is refused") {
  const TemporaryFolder folder;
  folder.write("file", "x");
  CHECK(is_there(folder / "file"));
  CHECK(is_there(folder.path()));
  CHECK_FALSE(is_there(folder / "nothing"));
  CHECK_FALSE(is_there(folder / "file/below"));
  CHECK_FALSE(is_there(folder / std::string(300, 'x')));  // no name is so long
  std::filesystem::create_symlink("loop", folder / "loop");
  require_error(ErrorKind::kConfig, {"loop: cannot be looked at: Too many levels"}, {"mend it"},
                [&] { is_there(folder / "loop", "mend it", ErrorKind::kConfig); });
  std::filesystem::create_symlink("elsewhere", folder / "link");
  require_error(ErrorKind::kData, {"link: is a link to what is not there"}, {"mend it"},
                [&] { is_there(folder / "link", "mend it"); });
}
