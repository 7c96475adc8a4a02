#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "observe/metrics.h"
#include "support/catch.h"
#include "support/errors.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;
using nlohmann::json;

namespace {

StepMetrics sample_step(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.steps_total = 1000;
  metrics.tokens = step * 4096;
  metrics.loss = 5.5;
  metrics.grad_norm = 1.25;
  metrics.lr = 0.0003;
  metrics.step_ms = 45.5;
  metrics.tokens_per_s = 90000;
  metrics.tflops_per_device = 12.5;
  metrics.memory_peak_bytes = int64_t{5} << 30;
  return metrics;
}

std::vector<json> lines_of(const std::filesystem::path& path) {
  std::ifstream stream(path);
  std::vector<json> result;
  for (std::string line; std::getline(stream, line);) result.push_back(json::parse(line));
  return result;
}

}  // namespace

TEST_CASE("Each step and each evaluation is one line, there at once") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "runs/first");
  const auto path = folder / "runs/first/metrics.jsonl";
  writer.write(sample_step(12));
  const std::string step =
      R"({"step":12,"tokens":49152,"loss":5.5,"grad_norm":1.25,"lr":0.0003,"step_ms":45.5,"tokens_per_s":90000.0,)"
      R"("tflops_per_gpu":12.5,"memory_peak_bytes":5368709120})"
      "\n";
  CHECK(read_file(path) == step);
  writer.write(EvaluationMetrics{12, 1000, 0.0, 37});
  CHECK(read_file(path) ==
        step + R"({"step":12,"validation_loss":0.0,"validation_ppl":1.0,"validation_samples":37})" + "\n");
}

TEST_CASE("A loss of no tokens is null, and so is its perplexity") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder.path());
  StepMetrics metrics = sample_step(1);
  metrics.loss.reset();
  writer.write(metrics);
  writer.write(EvaluationMetrics{1, 1000, {}, 37});
  const std::vector<json> lines = lines_of(folder / "metrics.jsonl");
  CHECK(lines[0]["loss"].is_null());
  CHECK(lines[1]["validation_loss"].is_null());
  CHECK(lines[1]["validation_ppl"].is_null());
  CHECK(lines[1]["validation_samples"] == 37);
}

TEST_CASE("Skipped steps, a loss that stands out and the work of replicas are in the line only if there are any") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder.path());
  StepMetrics metrics = sample_step(1);
  writer.write(metrics);
  metrics.skipped_steps = 2;
  metrics.spike = 7.5;
  metrics.replica_seconds = {0.5, 0.25};
  writer.write(metrics);
  const std::vector<json> lines = lines_of(folder / "metrics.jsonl");
  CHECK(!lines[0].contains("skipped_steps"));
  CHECK(!lines[0].contains("loss_zscore"));
  CHECK(!lines[0].contains("replica_seconds"));
  CHECK(lines[1]["skipped_steps"] == 2);
  CHECK(lines[1]["loss_zscore"] == 7.5);
  CHECK(lines[1]["replica_seconds"] == std::vector<double>{0.5, 0.25});
}

TEST_CASE("Numbers read back to the same bits; what JSON cannot say is null") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder.path());
  const std::vector<double> values{0.1, 1.0 / 3, 5.541234567890123, 4.9e-324, 1.7976931348623157e308, -0.0};
  for (const double value : values) {
    StepMetrics metrics = sample_step(1);
    metrics.loss = value;
    writer.write(metrics);
  }
  StepMetrics metrics = sample_step(1);
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  writer.write(metrics);

  const auto lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == values.size() + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto loss = lines[i]["loss"].get<double>();
    CHECK(loss == values[i]);
    CHECK(std::signbit(loss) == std::signbit(values[i]));
  }
  CHECK(lines.back()["loss"].is_null());
  CHECK(lines.back()["grad_norm"].is_null());
}

TEST_CASE("Perplexity is the exponential of the loss, up to exp(20)") {
  CHECK(EvaluationMetrics{0, 0, 2.0}.perplexity() == Approx(7.38905609893065).epsilon(1e-14));
  CHECK(EvaluationMetrics{0, 0, 25.0}.perplexity() == std::exp(20.0));
  CHECK(std::isnan(EvaluationMetrics{0, 0, std::numeric_limits<double>::quiet_NaN()}.perplexity()));
}

TEST_CASE("Metrics are appended after the last whole line") {
  const TemporaryFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto write_one = [&](int64_t step) { MetricsWriter(folder.path()).write(sample_step(step)); };
  const auto steps = [&] {
    std::vector<int64_t> result;
    for (const auto& line : lines_of(path)) result.push_back(line["step"].get<int64_t>());
    return result;
  };
  write_one(1);  // makes the file
  write_one(2);
  CHECK(steps() == std::vector<int64_t>{1, 2});

  const auto whole = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, whole - 1);  // only the line's end is lost
  write_one(3);
  CHECK(steps() == std::vector<int64_t>{1, 3});
  write_file(path, R"({"step":1,"tok)");  // no whole line at all
  write_one(4);
  CHECK(steps() == std::vector<int64_t>{4});
}

TEST_CASE("A folder or disk that cannot be written is an error with its name") {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  require_error(ErrorKind::kConfig, {"file/run/metrics.jsonl: its folder cannot be created"},
                [&] { MetricsWriter(folder / "file/run"); });
  std::filesystem::create_directories(folder / "dir/metrics.jsonl");
  require_error(ErrorKind::kConfig, {"metrics.jsonl: cannot be opened"}, [&] { MetricsWriter(folder / "dir"); });
  std::filesystem::create_symlink("/dev/full", folder / "metrics.jsonl");
  MetricsWriter full(folder.path());
  require_error(ErrorKind::kFault, {"metrics.jsonl: cannot be written: No space left"},
                [&] { full.write(sample_step(1)); });
}

// INVAR_PYTHON chooses the interpreter.
TEST_CASE("After a line that could not be written the next one is whole") {
  const TemporaryFolder folder;
  MetricsWriter writer(folder.path());
  writer.write(sample_step(1));
  {
    const FileSizeLimit full(std::filesystem::file_size(folder / "metrics.jsonl") + 20);
    require_error(ErrorKind::kFault, {"metrics.jsonl: cannot be written: File too large"}, {"ulimit -f"},
                  [&] { writer.write(sample_step(2)); });
    CHECK(lines_of(folder / "metrics.jsonl").size() == 1);  // nothing of the lost line is there
  }
  writer.write(sample_step(3));
  const std::vector<json> lines = lines_of(folder / "metrics.jsonl");
  REQUIRE(lines.size() == 2);
  CHECK(lines[0]["step"] == 1);
  CHECK(lines[1]["step"] == 3);
}

TEST_CASE("tools/plot_metrics draws what is written here") {
  const char* chosen = std::getenv("INVAR_PYTHON");
  const std::string python = chosen != nullptr ? chosen : "python3";
  if (std::system((python + " -c 'import matplotlib' 2>/dev/null").c_str()) != 0) {
    WARN("SKIPPED: " << python << " has no matplotlib");
    return;
  }
  const TemporaryFolder folder;
  MetricsWriter writer(folder / "run");
  const auto plot = [&](const std::string& run) {
    const std::string command = python + " " INVAR_SOURCE_DIR "/tools/plot_metrics " + (folder / run).string() +
                                " -o " + (folder / "out.png").string() + " 2>" + (folder / "errors").string();
    return WEXITSTATUS(std::system(command.c_str()));
  };
  CHECK(plot("run") == 3);
  CHECK(contains(folder.read("errors"), "run/metrics.jsonl: holds no steps yet"));
  CHECK(plot("absent") == 3);
  CHECK(contains(folder.read("errors"), "absent: no such file"));
  CHECK_FALSE(std::filesystem::exists(folder / "out.png"));

  for (int64_t step = 1; step <= 20; ++step) writer.write(sample_step(step));
  StepMetrics broken = sample_step(21);
  broken.loss = std::numeric_limits<double>::quiet_NaN();
  writer.write(broken);
  writer.write(EvaluationMetrics{20, 1000, 5.25});
  CHECK(plot("run") == 0);
  CHECK(read_file(folder / "errors").empty());
  CHECK(read_file(folder / "out.png").substr(1, 3) == "PNG");
}
