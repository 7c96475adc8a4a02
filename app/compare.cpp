#include <cmath>

#include "app/commands.h"
#include "app/compare_report.h"
#include "app/console.h"

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
    if (fs::exists(path / "metrics.jsonl", error)) return {path / "metrics.jsonl", Kind::kMetrics};
    return {path, Kind::kSafetensors};  // refused when opened if it is not
  }
  if (path.extension() == ".h5") return {path, Kind::kDump};
  if (path.extension() == ".safetensors") return {path, Kind::kSafetensors};
  if (path.extension() == ".jsonl") return {path, Kind::kMetrics};
  if (!fs::exists(path, error)) throw Error(ErrorKind::kData, format("{}: no such file", text));
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

std::unique_ptr<TensorFile> open_tensors(const Side& side) {
  return side.kind == Kind::kDump ? open_dump(side.path) : open_safetensors(side.path);
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
  bool inside = false;
  std::vector<std::string> lines;
  if (a.kind == Kind::kMetrics) {
    const MetricsDifference found = compare_metrics(read_metrics(a.path), read_metrics(b.path), tolerance);
    inside = found.inside();
    lines = describe(found);
    if (const std::optional<HashDifference> hashes = compare_hashes(a.path, b.path)) {
      inside = inside && (hashes->all_equal() || !tolerance.exact);
      for (const std::string& line : describe(*hashes)) lines.push_back(line);
    }
  } else {
    const FileDifference found = compare_tensors(*open_tensors(a), *open_tensors(b), tolerance);
    inside = found.inside();
    lines = describe(found, arguments.all);
  }
  print_line(format("A {}\nB {}", a.path.string(), b.path.string()));
  for (const std::string& line : lines) print_line(line);
  return inside ? 0 : 1;
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
