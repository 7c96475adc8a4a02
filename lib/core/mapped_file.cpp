#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/unique_handle.h"

namespace invar {

MappedFile::MappedFile(const std::string& path, const std::string& hint) : path_(path) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::kData, format("{}: {}", path, what), hint);
  };
  const UniqueHandle<int, ::close, -1> file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) refuse(format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) refuse(format("cannot be looked at: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) refuse("not a regular file");
  if (status.st_size == 0) refuse("the file is empty");

  const auto size = static_cast<size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) refuse(format("cannot be mapped: {}", std::strerror(errno)));
  data_ = {static_cast<const std::byte*>(data), Unmap{size}};
}

void MappedFile::Unmap::operator()(const std::byte* data) const {
  ::munmap(const_cast<std::byte*>(data), size);
}

}  // namespace invar
