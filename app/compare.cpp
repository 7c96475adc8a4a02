#include <cmath>

#include "app/commands.h"
#include "app/compare_report.h"
#include "app/console.h"
#include "core/presence.h"

namespace invar::app {
namespace {

namespace fs = std::filesystem;

enum class Kind : uint8_t { kDump, kSafetensors, kMetrics };

struct Side {
  fs::path path;
  Kind kind;
};

const char* word_of(Kind kind) {
  switch (kind) {
    case Kind::kDump:
      return "a dump";
    case Kind::kSafetensors:
      return "safetensors";
    case Kind::kMetrics:
      return "metrics";
  }
  return "";
}

// What a path is: by its ending, a folder by what it holds.
Side side_of(const std::string& text) {
  const fs::path path(text);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    if (is_there(path / "metrics.jsonl")) return {path / "metrics.jsonl", Kind::kMetrics};
    return {path, Kind::kSafetensors};  // refused when opened if it is not
  }
  if (path.extension() == ".h5") return {path, Kind::kDump};
  if (path.extension() == ".safetensors") return {path, Kind::kSafetensors};
  if (path.extension() == ".jsonl") return {path, Kind::kMetrics};
  if (!is_there(path)) throw Error(ErrorKind::kData, format("{}: no such file", text));
  throw Error(ErrorKind::kConfig, format("{}: neither .h5, .safetensors nor .jsonl", text),
              "give two dumps, safetensors files or Hugging Face folders, or two metrics.jsonl or run folders");
}

Tolerance tolerance_of(const CompareArguments& arguments) {
  Tolerance tolerance;
  if (arguments.exact && (arguments.atol || arguments.rtol || arguments.norm_rtol)) {
    throw Error(ErrorKind::kConfig, "--exact leaves no room for --atol, --rtol and --norm-rtol",
                "remove the one or the other");
  }
  tolerance.exact = arguments.exact;
  tolerance.atol = arguments.atol.value_or(tolerance.atol);
  tolerance.rtol = arguments.rtol.value_or(tolerance.rtol);
  tolerance.norm_rtol = arguments.norm_rtol.value_or(tolerance.rtol);
  for (const double value : {tolerance.atol, tolerance.rtol, tolerance.norm_rtol}) {
    if (!(value >= 0) || std::isinf(value)) {
      throw Error(ErrorKind::kConfig, format("a tolerance cannot be {}", value), "give a number of at least 0");
    }
  }
  return tolerance;
}

// What is wrong with the two together names both.
template <class Compare>
auto of_both(const fs::path& a, const fs::path& b, Compare compare) {
  try {
    return compare();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kConfig) throw;  // names its file
    throw error.in(format("{} and {}", a.string(), b.string()));
  }
}

std::unique_ptr<TensorFile> open_tensors(const Side& side) {
  return side.kind == Kind::kDump ? open_dump(side.path) : open_safetensors(side.path);
}

struct Comparison {
  bool inside = false;
  std::vector<std::string> lines;
};

Comparison compare_runs(const fs::path& a, const fs::path& b, const Tolerance& tolerance) {
  const MetricsTable lines_a = read_metrics(a), lines_b = read_metrics(b);
  const MetricsDifference found = of_both(a, b, [&] { return compare_metrics(lines_a, lines_b, tolerance); });
  Comparison result{found.inside(), describe(found)};
  if (const std::optional<HashDifference> hashes = compare_hashes(a, b)) {
    result.inside = result.inside && (hashes->all_equal() || !tolerance.exact);
    for (const std::string& line : describe(*hashes)) result.lines.push_back(line);
  }
  return result;
}

Comparison compare_files(const Side& a, const Side& b, const Tolerance& tolerance, bool all) {
  const auto file_a = open_tensors(a), file_b = open_tensors(b);
  const FileDifference found = of_both(a.path, b.path, [&] { return compare_tensors(*file_a, *file_b, tolerance); });
  return {found.inside(), describe(found, all)};
}

int compare_in_one_process(const CompareArguments& arguments) {
  const Tolerance tolerance = tolerance_of(arguments);
  const Side a = side_of(arguments.a), b = side_of(arguments.b);
  if (arguments.norm_rtol && a.kind != Kind::kMetrics) {
    throw Error(ErrorKind::kConfig, "--norm-rtol is for the gradient norms of metrics", "use --rtol for tensors");
  }
  if ((a.kind == Kind::kMetrics) != (b.kind == Kind::kMetrics)) {
    throw Error(ErrorKind::kConfig,
                format("{} is {} and {} is {}: they cannot be compared", a.path.string(), word_of(a.kind),
                       b.path.string(), word_of(b.kind)),
                "compare metrics with metrics and tensors with tensors");
  }
  const Comparison found = a.kind == Kind::kMetrics ? compare_runs(a.path, b.path, tolerance)
                                                    : compare_files(a, b, tolerance, arguments.all);
  print_line(format("A {}\nB {}", a.path.string(), b.path.string()));
  for (const std::string& line : found.lines) print_line(line);
  return found.inside ? 0 : 1;
}

}  // namespace

int compare(const CompareArguments& arguments, MpiSession& session) {
  int code = 0;
  together(session.world(), [&] {
    if (session.world().size() > 1) {
      throw Error(ErrorKind::kConfig, "compare runs in one process", "start it without mpirun");
    }
    code = compare_in_one_process(arguments);
  });
  return code;
}

}  // namespace invar::app
