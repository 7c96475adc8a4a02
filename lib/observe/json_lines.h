#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

namespace invar {

enum class OpenMode : uint8_t {
  kNew,     // what an earlier run left as NAME.jsonl is kept as NAME.previous.jsonl
  kAppend,  // a resumed run
};

// A file of one JSON object a line, each on disk before the call returns (flushed, not synced). A line that could not
// be written is lost; the next call tries again. A resumed run appends, and may repeat steps that were lost: of two
// lines for a step the later one counts. System errors throw Error{kFault}.
class JsonLines {
 public:
  // Creates the folder if need be. kAppend first removes a last line that a killed run left half written.
  JsonLines(const std::filesystem::path& folder, const std::string& name, OpenMode mode);

  void write(const std::string& line);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void reopen();

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace invar
