#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace invar {

// What a run says to people: on rank 0's console, and in RUN_DIR/log.txt with time and level. World rank 0 logs
// everything; the other ranks log warnings and errors only, to the file, under their rank. Each line is flushed.
// Owned by the application and passed down; there is no global logger. Safe to use from several threads.
class Log {
 public:
  // An empty run_directory: console only. The folder is created if need be and the file appended to. Error{kFault} if
  // that cannot be done.
  Log(int world_rank, const std::filesystem::path& run_directory);
  ~Log();
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;

  void info(const std::string& message);
  void warn(const std::string& message);   // console: "warning: message"
  void error(const std::string& message);  // file only: what ends the job is said once, on standard error, by main

 private:
  struct Sinks;
  std::unique_ptr<Sinks> sinks_;
};

}  // namespace invar
