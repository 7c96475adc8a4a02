#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace invar {

// One optimizer step of the whole job.
struct StepMetrics {
  int64_t step = 0;  // steps done, this one included
  int64_t steps_total = 0;
  int64_t tokens = 0;    // trained on since step 0, over all ranks
  double loss = 0;       // mean over the step's tokens, nats
  double grad_norm = 0;  // before clipping
  double lr = 0;
  double step_ms = 0;
  double tokens_per_s = 0;        // all ranks together
  double tflops_per_device = 0;   // model FLOPs, see throughput.h
  int64_t memory_peak_bytes = 0;  // resident, of the rank that had most
  int64_t skipped_steps = 0;      // so far, for losses or gradients that are not finite
  std::optional<double> spike;    // z-score of a loss that stands out
};

struct EvaluationMetrics {
  int64_t step = 0;
  int64_t steps_total = 0;
  double validation_loss = 0;  // mean over the evaluated tokens, nats

  double perplexity() const;  // exp(min(20, loss)): a large loss stays printable
};

enum class OpenMode : uint8_t {
  kNew,     // what an earlier run left is kept as metrics.previous.jsonl
  kAppend,  // a resumed run
};

// Writes RUN_DIR/metrics.jsonl, one JSON object a line, on disk before the call returns (flushed, not synced):
//   {"step", "tokens", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "tflops_per_gpu", "memory_peak_bytes"},
//     with "skipped_steps" once there are any, and "loss_zscore" where the loss stands out
//   {"step", "validation_loss", "validation_ppl"}
// Numbers read back to the same bits. JSON has no NaN and no infinity: they are written as null.
// A line that could not be written is lost; the next call tries again.
// A resumed run appends, and may repeat steps that were lost: of two lines for a step the later one counts.
class MetricsWriter {
 public:
  // Creates the folder if need be. kAppend first removes a last line that a killed run left half written.
  MetricsWriter(const std::filesystem::path& run_directory, OpenMode mode);

  void write(const StepMetrics& metrics);
  void write(const EvaluationMetrics& metrics);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void write_line(const std::string& line);
  void reopen();

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace invar
