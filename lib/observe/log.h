#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace invar {

// What a run says to people: on rank 0's console, and in RUN_DIR/log.txt with time and level. World rank 0 logs
// everything; the other ranks log warnings and errors only, to the file, under their rank in the job. Each line is
// handed to the system at once. A console or a file that cannot be written ends nothing: its lines are lost as long as
// that lasts, which is told once, on the other one. Owned by the application and passed down. Safe to use from several
// threads.
class Log {
 public:
  // An empty run_directory: console only. The folder is created if need be and the file appended to. Errors as those of
  // LineFile. World rank 0 removes a torn last line: the others may write when it has come back. job_rank: none if it
  // is the same.
  Log(int world_rank, const std::filesystem::path& run_directory, std::optional<int> job_rank = {});
  ~Log();
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;

  void info(const std::string& message);
  void warn(const std::string& message);   // console: "warning: message"
  void error(const std::string& message);  // file only: what ends the job is said once, on standard error, by main

 private:
  struct Outputs;
  std::unique_ptr<Outputs> outputs_;
};

}  // namespace invar
