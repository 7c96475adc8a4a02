#include "app/compare_report.h"

#include <algorithm>
#include <set>

#include "core/tensor.h"
#include "ops/block_hashes.h"

namespace invar::app {
namespace {

constexpr size_t kListed = 10;

const char* word_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kEqual:
      return "equal";
    case Verdict::kInside:
      return "ok";
    case Verdict::kOutside:
      return "OUTSIDE";
  }
  return "";
}

std::string joined(const std::vector<int64_t>& numbers, size_t count) {
  std::string text;
  for (size_t i = 0; i < std::min(count, numbers.size()); ++i) text += format("{}{}", i == 0 ? "" : ", ", numbers[i]);
  return text;
}

std::string describe_index(const std::vector<int64_t>& index) {
  return index.empty() ? "" : format("[{}]", joined(index, index.size()));
}

// Of a model there are hundreds of gradients and weights.
bool is_one_of_many(const TensorDifference& tensor) {
  static constexpr const char* kFew[] = {"tokens", "labels", "loss", "grad_norm", "logits"};
  return !tensor.name.starts_with("hidden.") &&
         std::none_of(std::begin(kFew), std::end(kFew), [&](const char* name) { return tensor.name == name; });
}

double share_of_band(const TensorDifference& tensor) {
  if (!tensor.mismatch.empty()) return std::numeric_limits<double>::infinity();
  if (tensor.band > 0) return tensor.max_abs / tensor.band;
  return tensor.verdict == Verdict::kEqual ? 0 : std::numeric_limits<double>::infinity();
}

// Tensors to be listed, in their order.
std::vector<const TensorDifference*> listed(const FileDifference& difference, bool all) {
  std::vector<const TensorDifference*> many;
  for (const TensorDifference& tensor : difference.tensors) {
    if (is_one_of_many(tensor)) many.push_back(&tensor);
  }
  std::stable_sort(many.begin(), many.end(), [](const TensorDifference* x, const TensorDifference* y) {
    return share_of_band(*x) > share_of_band(*y);
  });
  const std::set<const TensorDifference*> worst(many.begin(),
                                                many.begin() + std::min<ptrdiff_t>(kListed, std::ssize(many)));
  std::vector<const TensorDifference*> out;
  for (const TensorDifference& tensor : difference.tensors) {
    if (all || !is_one_of_many(tensor) || tensor.verdict == Verdict::kOutside || worst.contains(&tensor)) {
      out.push_back(&tensor);
    }
  }
  return out;
}

std::string row_of(const TensorDifference& tensor, size_t name_width, size_t shape_width) {
  const std::string head = format("{:<{}}  {:<{}}", tensor.name, name_width, describe_shape(tensor.shape), shape_width);
  if (!tensor.mismatch.empty()) return format("{}  {}  OUTSIDE", head, tensor.mismatch);
  const std::string growth = tensor.growth ? format("{:.2f}", *tensor.growth) : "";
  return format("{}  {:>9.2e}  {:>9.2e}  {:>6}  {:>9.2e}  {:<16}  {}", head, tensor.max_abs, tensor.mean_abs, growth,
                tensor.band, describe_index(tensor.first_outside), word_of(tensor.verdict));
}

void describe_names(std::vector<std::string>& lines, const std::vector<std::string>& names, const char* where) {
  for (const std::string& name : names) lines.push_back(format("only in {}: {}", where, name));
}

void describe_logits(std::vector<std::string>& lines, const LogitsDifference& logits) {
  const auto real =
      std::count_if(logits.flips.begin(), logits.flips.end(), [](const Flip& flip) { return !flip.near_tie; });
  lines.push_back(format("argmax of the logits: differs at {} of {} positions ({} near ties, {} real)",
                         logits.flips.size(), logits.positions, std::ssize(logits.flips) - real, real));
  for (size_t i = 0; i < std::min(kListed, logits.flips.size()); ++i) {
    const Flip& flip = logits.flips[i];
    lines.push_back(format("  {}: token {} in A, {} in B; gap {:.2e} in A, {:.2e} in B; max |difference| {:.2e}: {}",
                           describe_index(flip.position), flip.token_a, flip.token_b, flip.gap_a, flip.gap_b,
                           flip.max_abs, flip.near_tie ? "near tie" : "real difference"));
  }
  if (logits.flips.size() > kListed) lines.push_back(format("  … and {} more", logits.flips.size() - kListed));
  lines.push_back(
      format("gap of the two largest logits: min {:.2e}, median {:.2e} in A; min {:.2e}, median {:.2e} in B",
             logits.min_gap_a, logits.median_gap_a, logits.min_gap_b, logits.median_gap_b));
}

std::string describe_kind(const KindDifference& kind) {
  if (kind.first.empty()) return format("  {}: no hashes of its tensors in both runs", kind.kind);
  std::string line =
      format("  {}: {} tensor{}, first {}", kind.kind, kind.tensors, kind.tensors == 1 ? "" : "s", kind.first);
  if (!kind.block) return line;
  int64_t elements = 1;
  for (const int64_t dim : kind.shape) elements *= dim;
  const int64_t begin = *kind.block * kHashBlock;
  return line + format(", block {} (elements {} to {} of {})", *kind.block, begin,
                       std::min(begin + kHashBlock, elements) - 1, describe_shape(kind.shape));
}

void describe_steps(std::vector<std::string>& lines, const std::vector<int64_t>& steps, const char* where) {
  if (steps.empty()) return;
  const std::string more = steps.size() > kListed ? format(" … {}", steps.back()) : "";
  lines.push_back(format("{} step{} only in {}: {}{}", steps.size(), steps.size() == 1 ? "" : "s", where,
                         joined(steps, kListed), more));
}

}  // namespace

std::vector<std::string> describe(const FileDifference& difference, bool all) {
  const std::vector<const TensorDifference*> rows = listed(difference, all);
  size_t name_width = 6, shape_width = 5;
  for (const TensorDifference* row : rows) {
    name_width = std::max(name_width, row->name.size());
    shape_width = std::max(shape_width, describe_shape(row->shape).size());
  }
  std::vector<std::string> lines = {format("{:<{}}  {:<{}}  {:>9}  {:>9}  {:>6}  {:>9}  {:<16}  verdict", "tensor",
                                           name_width, "shape", shape_width, "max abs", "mean abs", "growth", "band",
                                           "first outside")};
  for (const TensorDifference* row : rows) lines.push_back(row_of(*row, name_width, shape_width));
  if (const size_t rest = difference.tensors.size() - rows.size(); rest > 0) {
    lines.push_back(format("… and {} more within their bands", rest));
  }
  describe_names(lines, difference.only_a, "A");
  describe_names(lines, difference.only_b, "B");
  if (!difference.left_out_a.empty()) lines.push_back(format("left out of A: {}", difference.left_out_a));
  if (!difference.left_out_b.empty()) lines.push_back(format("left out of B: {}", difference.left_out_b));
  if (difference.logits) describe_logits(lines, *difference.logits);
  const auto vacuous = std::count_if(difference.tensors.begin(), difference.tensors.end(),
                                     [](const auto& tensor) { return tensor.is_vacuous(); });
  if (vacuous > 0)
    lines.push_back(format("{} tensors hold nothing above their band: lower --atol to judge them", vacuous));
  const auto outside = std::count_if(difference.tensors.begin(), difference.tensors.end(),
                                     [](const auto& tensor) { return tensor.verdict == Verdict::kOutside; });
  lines.push_back(format("{} tensors compared, {} outside, {} on one side only", difference.tensors.size(), outside,
                         difference.only_a.size() + difference.only_b.size()));
  return lines;
}

std::vector<std::string> describe(const MetricsDifference& difference) {
  std::vector<std::string> lines = {format("{:<15}  {:>6}  {:>9}  {:>12}  {:>15}  {:>13}  verdict", "field", "steps",
                                           "max abs", "max relative", "first differing", "first outside")};
  for (const FieldDifference& field : difference.fields) {
    const auto step = [](const std::optional<int64_t>& at) { return at ? format("{}", *at) : ""; };
    lines.push_back(format("{:<15}  {:>6}  {:>9.2e}  {:>12.2e}  {:>15}  {:>13}  {}", field.field, field.steps,
                           field.max_abs, field.max_relative, step(field.first_differing), step(field.first_outside),
                           word_of(field.verdict)));
  }
  describe_steps(lines, difference.only_a, "A");
  describe_steps(lines, difference.only_b, "B");
  if (!difference.proves()) lines.emplace_back("no step has a finite loss in both: nothing is compared");
  return lines;
}

std::vector<std::string> describe(const HashDifference& difference) {
  if (difference.all_equal()) {
    return {format("state: {} step{} with equal state", difference.steps, difference.steps == 1 ? "" : "s")};
  }
  if (difference.steps == 0) return {"state: no step with hashes in common"};
  std::vector<std::string> lines = {format("state: equal at {} of {} hashed steps, first differing at step {}",
                                           difference.equal, difference.steps, *difference.first_differing)};
  for (const KindDifference& kind : difference.kinds) lines.push_back(describe_kind(kind));
  if (difference.kinds.empty()) lines.emplace_back("  loss or gradient norm alone");
  return lines;
}

}  // namespace invar::app
