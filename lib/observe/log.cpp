#include "observe/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "core/error.h"

namespace invar {

// Two loggers made directly, so that spdlog's registry of names stays out of it. Either may be absent.
struct Log::Sinks {
  std::unique_ptr<spdlog::logger> console;
  std::unique_ptr<spdlog::logger> file;

  void write(spdlog::level::level_enum level, const std::string& message, const char* console_prefix) {
    if (console) console->log(level, spdlog::string_view_t(console_prefix + message));
    if (file) file->log(level, spdlog::string_view_t(message));
  }
};

namespace {

std::unique_ptr<spdlog::logger> make_console() {
  // No colours: mpirun gives rank 0 a terminal of its own, also where its output goes to a file.
  auto logger = std::make_unique<spdlog::logger>("console", std::make_shared<spdlog::sinks::stdout_sink_mt>());
  logger->set_pattern("%v");
  logger->flush_on(spdlog::level::info);
  return logger;
}

std::unique_ptr<spdlog::logger> make_file(int world_rank, const std::filesystem::path& path) {
  try {
    auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path.string());
    auto logger = std::make_unique<spdlog::logger>("file", std::move(sink));
    logger->set_pattern(format("%Y-%m-%d %H:%M:%S.%e | rank {} | %l | %v", world_rank));
    logger->set_level(world_rank == 0 ? spdlog::level::info : spdlog::level::warn);
    logger->flush_on(spdlog::level::info);
    return logger;
  } catch (const spdlog::spdlog_ex& error) {
    throw Error(ErrorKind::kFault, format("{}: cannot be opened: {}", path.string(), error.what()),
                "the run directory must be writable");
  }
}

}  // namespace

Log::Log(int world_rank, const std::filesystem::path& run_directory) : sinks_(std::make_unique<Sinks>()) {
  if (world_rank == 0) sinks_->console = make_console();
  if (!run_directory.empty()) sinks_->file = make_file(world_rank, run_directory / "log.txt");
}

Log::~Log() = default;
Log::Log(Log&&) noexcept = default;
Log& Log::operator=(Log&&) noexcept = default;

void Log::info(const std::string& message) {
  sinks_->write(spdlog::level::info, message, "");
}
void Log::warn(const std::string& message) {
  sinks_->write(spdlog::level::warn, message, "warning: ");
}
void Log::error(const std::string& message) {
  if (sinks_->file) sinks_->file->log(spdlog::level::err, spdlog::string_view_t(message));
}

}  // namespace invar
