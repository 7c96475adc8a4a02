#include "fuzz/fuzz_input.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"

namespace invar::fuzz {
namespace {

namespace fs = std::filesystem;

class MemoryFolder {
 public:
  MemoryFolder() {
    const fs::path memory = "/dev/shm";
    std::error_code error;
    std::string name =
        ((fs::is_directory(memory, error) ? memory : fs::temp_directory_path()) / "fuzz_XXXXXX").string();
    expect(::mkdtemp(name.data()) != nullptr, "no temporary folder");
    path_ = name;
  }
  ~MemoryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

const fs::path& memory_folder() {
  static const MemoryFolder kFolder;
  return kFolder.path();
}

bool is_plain(const std::string& message) {
  return std::ranges::none_of(message, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

}  // namespace

std::string folder() {
  return memory_folder().string();
}

std::string file(const std::string& name, std::string_view bytes) {
  const std::string path = (memory_folder() / name).string();
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  expect(descriptor >= 0, "cannot open the file of the input");
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    expect(written > 0, "cannot write the file of the input");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  ::close(descriptor);
  return path;
}

bool reads_or_refuses(std::initializer_list<std::string_view> named, const std::function<void()>& read) {
  constexpr size_t kLongest = 4000;
  try {
    read();
    return true;
  } catch (const Error& error) {
    const std::string message = error.what();
    const bool is_named =
        std::ranges::any_of(named, [&](std::string_view name) { return message.find(name) != std::string::npos; });
    if (error.kind() != ErrorKind::kFault && is_named && message.size() <= kLongest && is_plain(message)) return false;
    std::fprintf(stderr, "finding: a refusal of kind %d, with the message:\n%s\n", static_cast<int>(error.kind()),
                 message.c_str());
    std::abort();
  }
}

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "finding: %s\n", what);
  std::abort();
}

}  // namespace invar::fuzz
