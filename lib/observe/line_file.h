#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "core/unique_handle.h"

namespace invar {

// A text file that grows by whole lines, each handed to the system before the call returns (not synced), so that a
// reader sees whole lines. What cannot be written leaves nothing of its line. Several processes may append.
class LineFile {
 public:
  // Creates the folder if need be, and removes a last line that an end of the machine left half written. Error{kConfig}
  // if the path cannot be used, {kFault} on a full or broken disk.
  explicit LineFile(std::filesystem::path path);

  // Error{kFault} with the file's name and the system's reason; the next call tries again.
  void write(const std::string& line);

 private:
  void remove_torn_line() const;

  std::filesystem::path path_;
  UniqueHandle<int, ::close, -1> file_;
};

}  // namespace invar
