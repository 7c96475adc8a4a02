#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "core/unique_handle.h"

namespace invar {

// What becomes of a last line that an end of the machine left half written. Of the processes that append to a file one
// removes it, before the others write.
enum class TornLine : uint8_t { kRemove, kKeep };

// A text file that grows by whole lines, each handed to the system before the call returns (not synced), so that a
// reader sees whole lines. What cannot be written leaves nothing of its line. Several processes may append.
class LineFile {
 public:
  // Creates the folder if need be. Error{kConfig} if the path cannot be used, {kFault} on a full or broken disk.
  explicit LineFile(std::filesystem::path path, TornLine torn = TornLine::kRemove);

  // Error{kFault} with the file's name and the system's reason; the next call tries again.
  void write(const std::string& line);

 private:
  void remove_torn_line(off_t size) const;

  std::filesystem::path path_;
  UniqueHandle<int, ::close, -1> file_;
};

}  // namespace invar
