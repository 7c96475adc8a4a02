#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "app/tolerance.h"

namespace invar::app {

// What the lines of a metrics.jsonl say of each step: field → value, NaN where the file has null. Of two lines for a
// step the later one counts; a last line that is not finished is not read. Error{kData} with file and line for a line
// that is not an object with a step, or whose hashes are none.
using MetricsTable = std::map<int64_t, std::map<std::string, double>>;
MetricsTable read_metrics(const std::filesystem::path& path);

// The same of "state_hash": what is hashed → hash, of the steps that have it.
using DigestTable = std::map<int64_t, std::map<std::string, std::string>>;
DigestTable read_digests(const std::filesystem::path& path);

// One field over the steps at which both have it.
struct FieldDifference {
  std::string field;
  int64_t steps = 0;
  int64_t finite = 0;  // of them, with numbers in both
  double max_abs = 0;
  double max_relative = 0;  // |a − b| / |b|
  std::optional<int64_t> first_differing;
  std::optional<int64_t> first_outside;  // |a − b| > atol + rtol · |b|; norm_rtol for grad_norm; of tokens, |a − b| > 0
  Verdict verdict = Verdict::kEqual;
};

struct MetricsDifference {
  std::vector<FieldDifference> fields;  // loss, grad_norm, lr, tokens, validation_loss where both have them
  std::vector<int64_t> only_a;          // steps with a loss in one file only: told, but no difference
  std::vector<int64_t> only_b;

  // Whether a step has a finite loss in both. Without one nothing of the training is compared.
  bool proves() const;
  // Whether it proves something and no field is outside.
  bool inside() const;
};

// Error{kConfig} if no step has a loss in both.
MetricsDifference compare_metrics(const MetricsTable& a, const MetricsTable& b, const Tolerance& tolerance);

}  // namespace invar::app
