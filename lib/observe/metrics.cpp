#include "observe/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace invar {

using nlohmann::ordered_json;

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();  // null

ordered_json digest_json(const StateDigest& digest) {
  ordered_json object;
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    object[std::string(kStateKindNames[kind])] = hash_text(digest.kinds[kind]);
  }
  object["combined"] = hash_text(digest.combined);
  return object;
}

}  // namespace

double EvaluationMetrics::perplexity() const {
  return std::exp(std::min(validation_loss.value_or(kNone), 20.0));  // in this order min hands a NaN on
}

void MetricsWriter::write(const StepMetrics& metrics) {
  ordered_json line;
  line["step"] = metrics.step;
  line["tokens"] = metrics.tokens;
  line["loss"] = metrics.loss.value_or(kNone);
  line["grad_norm"] = metrics.grad_norm;
  line["lr"] = metrics.lr;
  line["step_ms"] = metrics.step_ms;
  line["tokens_per_s"] = metrics.tokens_per_s;
  line["tflops_per_gpu"] = metrics.tflops_per_device;
  line["memory_peak_bytes"] = metrics.memory_peak_bytes;
  if (metrics.skipped_steps > 0) line["skipped_steps"] = metrics.skipped_steps;
  if (metrics.spike) line["loss_zscore"] = *metrics.spike;
  if (!metrics.replica_seconds.empty()) line["replica_seconds"] = metrics.replica_seconds;
  if (metrics.state_hash) line["state_hash"] = digest_json(*metrics.state_hash);
  lines_.write(line.dump());
}

void MetricsWriter::write(const EvaluationMetrics& metrics) {
  ordered_json line;
  line["step"] = metrics.step;
  line["validation_loss"] = metrics.validation_loss.value_or(kNone);
  line["validation_ppl"] = metrics.perplexity();
  line["validation_samples"] = metrics.samples;
  lines_.write(line.dump());
}

void StateHashWriter::write(int64_t step, const StateHash& hash) {
  ordered_json line;
  line["step"] = step;  // first, so that compare finds the line of a step without parsing the others
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    ordered_json& tensors = line[std::string(kStateKindNames[kind])] = ordered_json::object();
    for (const TensorHash& tensor : hash.tensors[kind]) tensors[tensor.name] = hash_text(tensor.hash());
  }
  lines_.write(line.dump());
}

}  // namespace invar
