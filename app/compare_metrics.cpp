#include "app/compare_metrics.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/json_object.h"
#include "core/text_lines.h"

namespace invar::app {
namespace {

constexpr const char* kLoss = "loss";
constexpr const char* kFields[] = {kLoss, "grad_norm", "lr", "tokens", "validation_loss"};

std::map<std::string, double> fields_of(const JsonObject& line) {
  std::map<std::string, double> fields;
  for (const std::string& name : line.names()) {
    if (line.is_number(name)) fields[name] = line.number(name, 0);
    if (line.is_null(name)) fields[name] = std::numeric_limits<double>::quiet_NaN();
  }
  return fields;
}

std::optional<double> value_at(const MetricsTable& table, int64_t step, const std::string& field) {
  const auto line = table.find(step);
  if (line == table.end()) return std::nullopt;
  const auto found = line->second.find(field);
  return found == line->second.end() ? std::nullopt : std::optional(found->second);
}

FieldDifference compare_field(const MetricsTable& a, const MetricsTable& b, const std::string& field,
                              const Tolerance& tolerance) {
  FieldDifference found;
  found.field = field;
  for (const auto& [step, line] : a) {
    const std::optional<double> x = value_at(a, step, field), y = value_at(b, step, field);
    if (!x || !y) continue;
    ++found.steps;
    if (std::isfinite(*x) && std::isfinite(*y)) ++found.finite;
    if (same_bits(*x, *y)) continue;
    const double distance = difference(*x, *y);
    found.max_abs = std::max(found.max_abs, distance);
    if (distance > 0) found.max_relative = std::max(found.max_relative, distance / std::abs(*y));
    if (!found.first_differing) found.first_differing = step;
    const double magnitude = std::isfinite(*y) ? std::abs(*y) : 0;
    const double band = field == "tokens"      ? 0
                        : field == "grad_norm" ? tolerance.norm_band(magnitude)
                                               : tolerance.band(magnitude);
    if (!found.first_outside && is_outside(*x, *y, band, tolerance.exact)) found.first_outside = step;
  }
  if (found.first_differing) found.verdict = found.first_outside ? Verdict::kOutside : Verdict::kInside;
  return found;
}

std::vector<int64_t> steps_only_in(const MetricsTable& a, const MetricsTable& b) {
  std::vector<int64_t> steps;
  for (const auto& [step, line] : a) {
    if (value_at(a, step, kLoss) && !value_at(b, step, kLoss)) steps.push_back(step);
  }
  return steps;
}

constexpr const char* kGiveMetrics = "give the metrics.jsonl of a run, or its folder";

// Calls visit(step, line).
void for_each_step(const std::filesystem::path& path,
                   const std::function<void(int64_t step, const JsonObject& line)>& visit) {
  JsonRules rules;
  rules.fix = kGiveMetrics;
  const auto visit_line = [&](int64_t number, const std::string& text) {
    const JsonObject line = JsonObject::parse(text, format("{}:{}", path.string(), number), rules);
    if (!line.is_number("step")) line.refuse("not a line of metrics: it has no step", kGiveMetrics);
    visit(line.integer("step"), line);
  };
  for_each_line(path.string(), visit_line, kGiveMetrics);
}

}  // namespace

MetricsTable read_metrics(const std::filesystem::path& path) {
  MetricsTable table;
  for_each_step(path, [&](int64_t step, const JsonObject& line) {
    for (const auto& [field, value] : fields_of(line)) table[step][field] = value;
  });
  return table;
}

DigestTable read_digests(const std::filesystem::path& path) {
  DigestTable table;
  for_each_step(path, [&](int64_t step, const JsonObject& line) {
    if (!line.has("state_hash")) return;
    const JsonObject hashes = line.object("state_hash");
    const std::vector<std::string> names = hashes.names();
    if (names.empty()) line.refuse("state_hash holds no hash", kGiveMetrics);
    table[step].clear();
    for (const std::string& name : names) table[step][name] = hashes.text(name, "");
  });
  return table;
}

bool MetricsDifference::proves() const {
  return std::ranges::any_of(fields,
                             [](const FieldDifference& field) { return field.field == kLoss && field.finite > 0; });
}

bool MetricsDifference::inside() const {
  return proves() &&
         std::ranges::none_of(fields, [](const FieldDifference& field) { return field.verdict == Verdict::kOutside; });
}

MetricsDifference compare_metrics(const MetricsTable& a, const MetricsTable& b, const Tolerance& tolerance) {
  MetricsDifference result;
  for (const char* field : kFields) {
    FieldDifference found = compare_field(a, b, field, tolerance);
    if (found.steps > 0) result.fields.push_back(std::move(found));
  }
  if (result.fields.empty() || result.fields.front().field != kLoss) {  // the rest says nothing of the training
    throw Error(ErrorKind::kConfig, "A and B have no step with a loss in common",
                "compare runs that logged the same steps");
  }
  result.only_a = steps_only_in(a, b);
  result.only_b = steps_only_in(b, a);
  return result;
}

}  // namespace invar::app
