#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace invar {

// A file that appears under its name only when it is complete: written as PATH.tmp, renamed by publish(), removed by
// the destructor if that never comes. PATH.tmp is a new file: what lies there is removed first, a link not followed.
// System errors throw Error{kFault} with the file's name.
class PendingFile {
 public:
  explicit PendingFile(std::filesystem::path path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void write_at(std::span<const std::byte> bytes, int64_t offset);
  // PATH.tmp, for a library that writes the file by its name and closes it before publish().
  const std::filesystem::path& temporary() const { return temporary_; }
  // Syncs the file, renames it and syncs the folder, so that a power cut leaves the old file or the new one.
  void publish();

 private:
  bool is_here() const;  // what PATH.tmp names is this file

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

// A small file, whole or not at all. System errors throw Error{kFault}.
void write_text_file(const std::filesystem::path& path, std::string_view text);

// Puts renames in a folder on disk. System errors throw Error{kFault}.
void sync_folder(const std::filesystem::path& folder);

}  // namespace invar
