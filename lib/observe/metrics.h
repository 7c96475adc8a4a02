#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "observe/line_file.h"
#include "observe/state_hash.h"

namespace invar {

// One optimizer step of the whole job.
struct StepMetrics {
  int64_t step = 0;  // steps done, this one included
  int64_t steps_total = 0;
  int64_t tokens = 0;            // trained on since step 0, over all ranks
  std::optional<double> loss{};  // mean over the step's counted tokens, nats; none without them
  double grad_norm = 0;          // before clipping
  double lr = 0;
  double step_ms = 0;
  double tokens_per_s = 0;              // all ranks together
  double tflops_per_device = 0;         // model FLOPs, see throughput.h
  int64_t memory_peak_bytes = 0;        // resident, of the rank that had most
  int64_t skipped_steps = 0;            // so far, that changed nothing: not finite, or without counted tokens
  std::optional<double> spike;          // z-score of a loss that stands out
  std::vector<double> replica_seconds;  // of work in this step, of each replica; only of unequal ones
  std::optional<StateDigest> state_hash;
};

struct EvaluationMetrics {
  int64_t step = 0;
  int64_t steps_total = 0;
  std::optional<double> validation_loss{};  // mean over the counted tokens, nats; none without them
  int64_t samples = 0;                      // that were evaluated

  double perplexity() const;  // exp(min(20, loss)): a large loss stays printable; NaN without one
};

// Writes RUN_DIR/metrics.jsonl, one JSON object a line (see LineFile), behind what is there. A resumed run may
// repeat steps that were lost. Of two lines for a step the later one counts.
//   {"step", "tokens", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "tflops_per_gpu", "memory_peak_bytes"},
//     "skipped_steps": once there are any
//     "loss_zscore": where the loss stands out
//     "replica_seconds": [...], where replicas of unequal widths or shares were measured
//     "state_hash": {"weights", "exp_avg", "exp_avg_sq", "gradients", "combined"}, each 16 hex digits, of a hashed
//     state
//   {"step", "validation_loss", "validation_ppl", "validation_samples"}
// Numbers read back to the same bits. JSON has no NaN and no infinity: they are written as null, as is a loss of no
// tokens.
class MetricsWriter {
 public:
  explicit MetricsWriter(const std::filesystem::path& run_directory) : lines_(run_directory / kMetricsFile) {}

  void write(const StepMetrics& metrics);
  void write(const EvaluationMetrics& metrics);

  static constexpr const char* kMetricsFile = "metrics.jsonl";

 private:
  LineFile lines_;
};

// Writes RUN_DIR/state_hashes.jsonl (see LineFile), the hash of every tensor at a step, in the model's order:
//   {"step", "weights": {NAME: 16 hex digits, ...}, "exp_avg", "exp_avg_sq", "gradients"}
class StateHashWriter {
 public:
  explicit StateHashWriter(const std::filesystem::path& run_directory) : lines_(run_directory / kStateHashesFile) {}

  void write(int64_t step, const StateHash& hash);

  static constexpr const char* kStateHashesFile = "state_hashes.jsonl";

 private:
  LineFile lines_;
};

}  // namespace invar
