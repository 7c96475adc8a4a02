#include "observe/metrics.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace invar {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

constexpr const char* kFileName = "metrics.jsonl";
constexpr const char* kPreviousName = "metrics.previous.jsonl";

[[noreturn]] void fail(const fs::path& path, const char* what, int error,
                       std::source_location where = std::source_location::current()) {
  throw Error(ErrorKind::kFault, format("{}: {}: {}", path.string(), what, std::strerror(error)),
              "the run directory must be writable and its disk not full", where);
}

void remove_torn_line(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error || size == 0) return;  // a new file
  std::ifstream stream(path, std::ios::binary);
  auto end = size;
  while (end > 0) {
    stream.seekg(static_cast<std::streamoff>(end - 1));
    if (stream.get() == '\n') break;
    --end;
  }
  stream.close();
  if (end < size) fs::resize_file(path, end, error);
  if (error) fail(path, "cannot be mended", error.value());
}

}  // namespace

double EvaluationMetrics::perplexity() const {
  return std::exp(std::min(validation_loss, 20.0));  // in this order min hands a NaN on
}

MetricsWriter::MetricsWriter(const fs::path& run_directory, OpenMode mode) : path_(run_directory / kFileName) {
  std::error_code error;
  fs::create_directories(run_directory, error);
  if (error) fail(run_directory, "cannot be created", error.value());
  if (mode == OpenMode::kAppend) {
    remove_torn_line(path_);
  } else if (fs::is_regular_file(fs::symlink_status(path_))) {
    fs::rename(path_, run_directory / kPreviousName, error);
    if (error) fail(path_, "cannot be moved aside", error.value());
  }
  file_.reset(std::fopen(path_.c_str(), mode == OpenMode::kAppend ? "ab" : "wb"));
  if (!file_) fail(path_, "cannot be opened", errno);
}

void MetricsWriter::write(const StepMetrics& metrics) {
  ordered_json line;
  line["step"] = metrics.step;
  line["tokens"] = metrics.tokens;
  line["loss"] = metrics.loss;
  line["grad_norm"] = metrics.grad_norm;
  line["lr"] = metrics.lr;
  line["step_ms"] = metrics.step_ms;
  line["tokens_per_s"] = metrics.tokens_per_s;
  line["tflops_per_gpu"] = metrics.tflops_per_device;
  line["memory_peak_bytes"] = metrics.memory_peak_bytes;
  if (metrics.skipped_steps > 0) line["skipped_steps"] = metrics.skipped_steps;
  if (metrics.spike) line["loss_zscore"] = *metrics.spike;
  write_line(line.dump());
}

void MetricsWriter::write(const EvaluationMetrics& metrics) {
  ordered_json line;
  line["step"] = metrics.step;
  line["validation_loss"] = metrics.validation_loss;
  line["validation_ppl"] = metrics.perplexity();
  write_line(line.dump());
}

void MetricsWriter::reopen() {
  remove_torn_line(path_);
  file_.reset(std::fopen(path_.c_str(), "ab"));
  if (!file_) fail(path_, "cannot be opened", errno);
}

// One write call a line, so that a reader of the growing file sees whole lines.
void MetricsWriter::write_line(const std::string& line) {
  if (file_ == nullptr) reopen();
  const std::string text = line + "\n";
  const bool done =
      std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0;
  if (done) return;
  const int error = errno;
  file_.reset();
  fail(path_, "cannot be written", error);
}

}  // namespace invar
