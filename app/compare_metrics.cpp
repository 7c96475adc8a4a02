#include "app/compare_metrics.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace invar::app {
namespace {

constexpr const char* kFields[] = {"loss", "grad_norm", "lr", "tokens", "validation_loss"};

std::map<std::string, double> fields_of(const nlohmann::json& line) {
  std::map<std::string, double> fields;
  for (const auto& [key, value] : line.items()) {
    if (value.is_number()) fields[key] = value.get<double>();
    if (value.is_null()) fields[key] = std::numeric_limits<double>::quiet_NaN();
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
    if (value_at(a, step, "loss") && !value_at(b, step, "loss")) steps.push_back(step);
  }
  return steps;
}

// Calls visit(step, line).
template <class Visit>
void for_each_line(const std::filesystem::path& path, Visit visit) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorKind::kData, format("{}: cannot be opened: {}", path.string(), std::strerror(errno)));
  int64_t number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    if (file.eof()) break;  // a run that was killed, or goes on, left it half written
    const auto line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) {
      throw Error(ErrorKind::kData, format("{}:{}: not a line of metrics", path.string(), number),
                  "give the metrics.jsonl of a run, or its folder");
    }
    visit(line["step"].get<int64_t>(), line);
  }
}

}  // namespace

MetricsTable read_metrics(const std::filesystem::path& path) {
  MetricsTable table;
  for_each_line(path, [&](int64_t step, const nlohmann::json& line) {
    for (const auto& [field, value] : fields_of(line)) table[step][field] = value;
  });
  return table;
}

DigestTable read_digests(const std::filesystem::path& path) {
  DigestTable table;
  for_each_line(path, [&](int64_t step, const nlohmann::json& line) {
    const auto found = line.find("state_hash");
    if (found == line.end() || !found->is_object()) return;
    table[step].clear();
    for (const auto& [name, hash] : found->items()) table[step][name] = hash.is_string() ? hash.get<std::string>() : "";
  });
  return table;
}

bool MetricsDifference::inside() const {
  return std::none_of(fields.begin(), fields.end(),
                      [](const FieldDifference& field) { return field.verdict == Verdict::kOutside; });
}

MetricsDifference compare_metrics(const MetricsTable& a, const MetricsTable& b, const Tolerance& tolerance) {
  MetricsDifference result;
  for (const char* field : kFields) {
    FieldDifference found = compare_field(a, b, field, tolerance);
    if (found.steps > 0) result.fields.push_back(std::move(found));
  }
  if (result.fields.empty()) {
    throw Error(ErrorKind::kConfig, "A and B have no step in common", "compare runs that logged the same steps");
  }
  result.only_a = steps_only_in(a, b);
  result.only_b = steps_only_in(b, a);
  return result;
}

}  // namespace invar::app
