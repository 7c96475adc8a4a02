#include "core/whole_write.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace invar {

Written write_whole(int descriptor, std::string_view text) {
  Written written;
  while (written.bytes < text.size()) {
    const ssize_t count = ::write(descriptor, text.data() + written.bytes, text.size() - written.bytes);
    if (count >= 0) {
      written.bytes += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      pollfd ready{descriptor, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      written.error = errno;
      return written;
    }
  }
  return written;
}

}  // namespace invar
