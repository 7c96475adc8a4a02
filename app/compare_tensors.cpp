#include "app/compare_tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <map>

#include "core/tensor.h"

namespace invar::app {
namespace {

constexpr int64_t kBlockElements = 4 << 20;
constexpr const char* kLogits = "logits";
constexpr std::string_view kHidden = "hidden.";

// Position in the report.
int group_of(const std::string& name) {
  constexpr std::array<std::string_view, 4> kFirst = {"tokens", "labels", "loss", "grad_norm"};
  const auto found = std::find(kFirst.begin(), kFirst.end(), name);
  if (found != kFirst.end()) return static_cast<int>(found - kFirst.begin());
  if (name.starts_with(kHidden)) return 4;
  return name == kLogits ? 5 : 6;
}

// Digits inside names as numbers: hidden.2 before hidden.10.
bool before(const std::string& a, const std::string& b) {
  if (group_of(a) != group_of(b)) return group_of(a) < group_of(b);
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    size_t end_i = i, end_j = j;
    while (end_i < a.size() && is_digit(a[end_i])) ++end_i;
    while (end_j < b.size() && is_digit(b[end_j])) ++end_j;
    if (end_i == i || end_j == j) {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i, ++j;
      continue;
    }
    const std::string x = a.substr(i, end_i - i), y = b.substr(j, end_j - j);
    if (x != y) return x.size() != y.size() ? x.size() < y.size() : x < y;
    i = end_i, j = end_j;
  }
  return a.size() - i < b.size() - j;
}

// A block of rows of the matrix views of both.
struct Block {
  std::span<const double> a;
  std::span<const double> b;
  int64_t first_row;
};

// Calls visit(block) from the first row to the last, until it returns false.
void for_each_block(const TensorFile& a, const TensorFile& b, const std::string& name,
                    const std::function<bool(const Block&)>& visit) {
  const TensorFile::Info info = a.info(name);
  const int64_t step = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, info.cols()));
  std::vector<double> values_a, values_b;
  for (int64_t row = 0; row < info.rows(); row += step) {
    const Range rows{row, std::min(info.rows(), row + step)};
    values_a.resize(static_cast<size_t>(rows.size() * info.cols()));
    values_b.resize(values_a.size());
    a.read_rows(name, rows, values_a);
    b.read_rows(name, rows, values_b);
    if (!visit({values_a, values_b, row})) return;
  }
}

std::vector<int64_t> index_of(int64_t flat, std::span<const int64_t> shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    index[d] = flat % shape[d];
    flat /= shape[d];
  }
  return index;
}

std::string mismatch_of(const TensorFile& a, const TensorFile& b, const std::string& name) {
  const TensorFile::Info info_a = a.info(name), info_b = b.info(name);
  if (info_a.shape != info_b.shape) {
    return format("shape {} in A, {} in B", describe_shape(info_a.shape), describe_shape(info_b.shape));
  }
  if (info_a.elements() == 0) return "holds no elements: nothing is compared";
  // Values are compared as numbers: a bf16 weight may be written as fp32.
  return info_a.is_integer != info_b.is_integer ? format("type {} in A, {} in B", info_a.dtype, info_b.dtype) : "";
}

// Largest and second largest value of a row, and where the first is; a NaN is never chosen.
struct TopTwo {
  int64_t token = -1;
  double first = -std::numeric_limits<double>::infinity();
  double second = -std::numeric_limits<double>::infinity();

  explicit TopTwo(std::span<const double> row) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i] > first || (token < 0 && row[i] == first)) {
        second = first;
        first = row[i];
        token = static_cast<int64_t>(i);
      } else if (row[i] > second) {
        second = row[i];
      }
    }
  }
  double gap() const { return first == second ? 0 : first - second; }
};

class LogitsScan {
 public:
  explicit LogitsScan(const TensorFile::Info& info)
      : cols_(static_cast<size_t>(info.cols())), leading_(info.shape.begin(), info.shape.end() - 1) {}

  void add(const Block& block) {
    for (size_t row = 0; row * cols_ < block.a.size(); ++row) {
      const auto a = block.a.subspan(row * cols_, cols_), b = block.b.subspan(row * cols_, cols_);
      const TopTwo top_a(a), top_b(b);
      gaps_a_.push_back(top_a.gap());
      gaps_b_.push_back(top_b.gap());
      if (top_a.token == top_b.token) continue;
      double worst = 0;
      for (size_t i = 0; i < cols_; ++i) worst = std::max(worst, difference(a[i], b[i]));
      flips_.push_back({index_of(block.first_row + static_cast<int64_t>(row), leading_), top_a.token, top_b.token,
                        top_a.gap(), top_b.gap(), worst, false});
    }
  }

  LogitsDifference result(double band) {
    LogitsDifference out;
    out.positions = std::ssize(gaps_a_);
    out.flips = std::move(flips_);
    for (Flip& flip : out.flips) flip.near_tie = std::max(flip.gap_a, flip.gap_b) <= 2 * band;
    std::stable_sort(out.flips.begin(), out.flips.end(), [](const Flip& x, const Flip& y) {
      if (x.near_tie != y.near_tie) return !x.near_tie;
      return std::min(x.gap_a, x.gap_b) > std::min(y.gap_a, y.gap_b);
    });
    out.min_gap_a = smallest(gaps_a_);
    out.min_gap_b = smallest(gaps_b_);
    out.median_gap_a = median(gaps_a_);
    out.median_gap_b = median(gaps_b_);
    return out;
  }

 private:
  static double smallest(const std::vector<double>& values) {
    return values.empty() ? 0 : *std::min_element(values.begin(), values.end());
  }
  // The upper one of two middle values.
  static double median(std::vector<double>& values) {
    if (values.empty()) return 0;
    const auto middle = values.begin() + std::ssize(values) / 2;
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  size_t cols_;
  std::vector<int64_t> leading_;
  std::vector<Flip> flips_;
  std::vector<double> gaps_a_, gaps_b_;
};

std::vector<int64_t> find_first_outside(const TensorFile& a, const TensorFile& b, const TensorDifference& found,
                                        bool exact) {
  const TensorFile::Info info = a.info(found.name);
  std::vector<int64_t> index;
  for_each_block(a, b, found.name, [&](const Block& block) {
    for (size_t i = 0; i < block.a.size(); ++i) {
      if (!is_outside(block.a[i], block.b[i], found.band, exact)) continue;
      index = index_of(block.first_row * info.cols() + static_cast<int64_t>(i), info.shape);
      return false;
    }
    return true;
  });
  return index;
}

TensorDifference compare_one(const TensorFile& a, const TensorFile& b, const std::string& name,
                             const Tolerance& tolerance, LogitsScan* logits) {
  const TensorFile::Info info = a.info(name);
  TensorDifference found;
  found.name = name;
  found.shape = info.shape;
  double sum = 0;
  bool equal = true;
  for_each_block(a, b, name, [&](const Block& block) {
    for (size_t i = 0; i < block.a.size(); ++i) {
      const double x = block.a[i], y = block.b[i];
      if (std::isfinite(y)) found.magnitude = std::max(found.magnitude, std::abs(y));
      if (same_bits(x, y)) continue;
      equal = false;
      const double distance = difference(x, y);
      sum += distance;
      found.max_abs = std::max(found.max_abs, distance);
    }
    if (logits != nullptr) logits->add(block);
    return true;
  });
  found.mean_abs = sum / static_cast<double>(info.elements());
  found.band = info.is_integer ? 0 : tolerance.band(found.magnitude);
  if (equal) return found;
  const bool outside = tolerance.exact || found.max_abs > found.band;
  found.verdict = outside ? Verdict::kOutside : Verdict::kInside;
  if (outside) found.first_outside = find_first_outside(a, b, found, tolerance.exact);
  return found;
}

// A jump at one layer is where an error enters; rounding grows slowly.
void add_growth(std::vector<TensorDifference>& tensors) {
  std::map<int64_t, TensorDifference*> layers;
  for (TensorDifference& tensor : tensors) {
    if (!tensor.name.starts_with(kHidden) || !tensor.mismatch.empty()) continue;
    int32_t layer = 0;
    const char* end = tensor.name.data() + tensor.name.size();
    const auto parsed = std::from_chars(tensor.name.data() + kHidden.size(), end, layer);
    if (parsed.ec == std::errc() && parsed.ptr == end) layers[layer] = &tensor;
  }
  for (const auto& [layer, tensor] : layers) {
    const auto previous = layers.find(layer - 1);
    if (previous == layers.end() || previous->second->mean_abs <= 0) continue;
    tensor->growth = tensor->mean_abs / previous->second->mean_abs;
  }
}

}  // namespace

bool FileDifference::inside() const {
  const bool any_proves = std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return !t.is_vacuous(); });
  return any_proves && only_a.empty() && only_b.empty() &&
         std::all_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.verdict != Verdict::kOutside; });
}

FileDifference compare_tensors(const TensorFile& a, const TensorFile& b, const Tolerance& tolerance) {
  std::vector<std::string> names_a = a.names(), names_b = b.names();
  std::sort(names_a.begin(), names_a.end(), before);
  std::sort(names_b.begin(), names_b.end(), before);
  std::vector<std::string> common;
  std::set_intersection(names_a.begin(), names_a.end(), names_b.begin(), names_b.end(), std::back_inserter(common),
                        before);
  if (common.empty()) {
    throw Error(ErrorKind::kConfig, "A and B have no tensor in common", "compare two files of the same model");
  }
  FileDifference result;
  result.left_out_a = a.describe_left_out();
  result.left_out_b = b.describe_left_out();
  if (a.kind() == b.kind()) {
    const auto only = [](const auto& these, const auto& those, auto& out) {
      std::set_difference(these.begin(), these.end(), those.begin(), those.end(), std::back_inserter(out), before);
    };
    only(names_a, names_b, result.only_a);
    only(names_b, names_a, result.only_b);
  }
  for (const std::string& name : common) {
    const TensorFile::Info info = a.info(name);
    if (std::string mismatch = mismatch_of(a, b, name); !mismatch.empty()) {
      TensorDifference& found = result.tensors.emplace_back();
      found.name = name;
      found.shape = info.shape;
      found.mismatch = std::move(mismatch);
      found.verdict = Verdict::kOutside;
      continue;
    }
    std::optional<LogitsScan> logits;
    if (name == kLogits && info.shape.size() > 1 && info.cols() > 1) logits.emplace(info);
    result.tensors.push_back(compare_one(a, b, name, tolerance, logits ? &*logits : nullptr));
    if (logits) result.logits = logits->result(result.tensors.back().band);
  }
  add_growth(result.tensors);
  return result;
}

}  // namespace invar::app
