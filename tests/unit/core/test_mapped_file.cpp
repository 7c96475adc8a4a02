#include "core/mapped_file.h"

#include "support/bytes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("a mapped file gives its bytes, and numbers at any offset") {
  const TemporaryFolder folder;
  const std::string bytes = "x" + bytes_of<int32_t>({-7, 1 << 30}) + bytes_of<uint64_t>({~uint64_t{1}});
  const std::string path = folder.write("a.bin", bytes);
  MappedFile first(path);
  const MappedFile file = std::move(first);
  CHECK(file.path() == path);
  CHECK(file.size() == 17);
  CHECK(std::string(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()) == bytes);
  CHECK(file.value<char>(0) == 'x');
  CHECK(file.value<int32_t>(1) == -7);
  CHECK(file.value<int32_t>(5) == 1 << 30);
  CHECK(file.value<uint64_t>(9) == ~uint64_t{1});
  for (const int64_t offset : {int64_t{-1}, int64_t{14}, int64_t{17}, std::numeric_limits<int64_t>::max()}) {
    require_error(ErrorKind::kFault, {"a.bin: byte " + std::to_string(offset)}, [&] { file.value<int32_t>(offset); });
  }
}

TEST_CASE("a file that cannot be mapped is refused with path, reason and the hint of the caller") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::filesystem::path& path, const std::string& reason) {
    require_error(ErrorKind::kData, {path.string() + ": " + reason}, {"check data.path"},
                  [&] { MappedFile(path.string(), "check data.path"); });
  };
  refused(folder / "none.bin", "cannot be opened: No such file or directory");
  refused(folder.path(), "not a regular file");
  refused("/dev/null", "not a regular file");
  refused(folder.write("empty.bin", ""), "the file is empty");
  CHECK(require_error(ErrorKind::kData, {"none.bin"}, [&] { MappedFile((folder / "none.bin").string()); })
            .hint()
            .empty());
}
