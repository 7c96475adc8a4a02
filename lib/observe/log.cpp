#include "observe/log.h"

#include <chrono>
#include <ctime>
#include <mutex>

#include "core/error.h"
#include "core/file_error.h"
#include "core/standard_output.h"
#include "observe/line_file.h"

namespace invar {
namespace {

void write_console(const std::string& line) {
  if (const int error = write_standard_output(line)) fail_file("standard output", "cannot be written", error);
}

// 2024-05-31 12:00:00.000, local time.
std::string time_stamp() {
  using std::chrono::system_clock;
  const auto now = system_clock::now();
  const std::time_t seconds = system_clock::to_time_t(now);
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()) % 1000;
  std::tm local{};
  localtime_r(&seconds, &local);
  return format("{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:03}", local.tm_year + 1900, local.tm_mon + 1, local.tm_mday,
                local.tm_hour, local.tm_min, local.tm_sec, milliseconds.count());
}

// A place for lines that may fail and come back.
struct Output {
  bool fails = false;

  // What went wrong, if it went well before.
  template <class Action>
  std::string attempt(Action action) {
    try {
      action();
      fails = false;
    } catch (const Error& error) {
      if (!std::exchange(fails, true)) return error.what();
    }
    return "";
  }
};

}  // namespace

struct Log::Outputs {
  std::mutex mutex;
  bool is_first = false;  // of the ranks that train
  int job_rank = 0;
  std::optional<LineFile> file;
  Output to_console, to_file;

  std::string put_in_file(const char* level, const std::string& message) {
    if (!file) return "";
    return to_file.attempt(
        [&] { file->write(format("{} | rank {} | {} | {}", time_stamp(), job_rank, level, message)); });
  }
  std::string put_on_console(const std::string& line) {
    if (!is_first) return "";
    return to_console.attempt([&] { write_console(line); });
  }

  // console: null for what is not for it. Each output's failure is told once, on the other one.
  void write(const char* level, const std::string& message, const char* console) {
    const std::lock_guard lock(mutex);
    const std::string no_console = console == nullptr ? "" : put_on_console(console + message);
    std::string no_file = put_in_file(level, message);
    if (!no_console.empty()) {
      const std::string also = put_in_file("warning", no_console + "; the run goes on without its console");
      if (no_file.empty()) no_file = also;
    }
    if (!no_file.empty()) put_on_console(format("warning: {}; the run goes on", no_file));
  }
};

Log::Log(int world_rank, const std::filesystem::path& run_directory, std::optional<int> job_rank)
    : outputs_(std::make_unique<Outputs>()) {
  outputs_->is_first = world_rank == 0;
  outputs_->job_rank = job_rank.value_or(world_rank);
  if (run_directory.empty()) return;
  try {
    outputs_->file.emplace(run_directory / "log.txt", outputs_->is_first ? TornLine::kRemove : TornLine::kKeep);
  } catch (const Error& error) {
    throw error.in("log.dir");
  }
}

Log::~Log() = default;
Log::Log(Log&&) noexcept = default;
Log& Log::operator=(Log&&) noexcept = default;

void Log::info(const std::string& message) {
  if (outputs_->is_first) outputs_->write("info", message, "");
}
void Log::warn(const std::string& message) {
  outputs_->write("warning", message, "warning: ");
}
void Log::error(const std::string& message) {
  outputs_->write("error", message, nullptr);
}

}  // namespace invar
