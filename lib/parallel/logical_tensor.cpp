#include "parallel/logical_tensor.h"

#include <algorithm>

#include "device/device.h"

namespace invar {
namespace {

// The runs that this rank contributes: none if another rank's copy counts.
std::vector<RowRun> contributed(const Parameter& parameter) {
  return parameter.counted() ? parameter.runs : std::vector<RowRun>{};
}

std::vector<int64_t> encode(const std::vector<RowRun>& runs) {
  std::vector<int64_t> bounds;
  for (const RowRun& run : runs) bounds.insert(bounds.end(), {run.global.begin, run.global.end});
  return bounds;
}

}  // namespace

std::vector<float> read_f32(const Stream& stream, const Tensor& flat, Range elements) {
  const Tensor whole = flat.view({flat.numel()});
  std::vector<float> out(static_cast<size_t>(elements.size()));
  if (flat.dtype() == DType::kF32) {
    copy_across(stream, whole.rows(elements.begin, elements.end), view_of(out));
    return out;
  }
  std::vector<BF16> stored(out.size());
  copy_across(stream, whole.rows(elements.begin, elements.end), view_of(stored));
  std::transform(stored.begin(), stored.end(), out.begin(), [](BF16 x) { return static_cast<float>(x); });
  return out;
}

void write_f32(const Stream& stream, std::span<const float> values, const Tensor& flat, Range elements) {
  const Tensor to = flat.rows(elements.begin, elements.end);
  if (flat.dtype() == DType::kF32) {
    std::vector<float> stored(values.begin(), values.end());
    copy_across(stream, view_of(stored), to);
    return;
  }
  std::vector<BF16> stored(values.size());
  std::transform(values.begin(), values.end(), stored.begin(), [](float x) { return BF16(x); });
  copy_across(stream, view_of(stored), to);
}

void copy_run_to_logical(const Parameter& parameter, const RowRun& run, std::span<const float> stored,
                         std::span<float> logical) {
  const int64_t cols = parameter.cols();
  if (!parameter.transposed) {
    std::copy(stored.begin(), stored.end(), logical.begin() + run.global.begin * cols);
    return;
  }
  for (int64_t i = 0; i < run.global.size(); ++i) {
    for (int64_t col = 0; col < cols; ++col) {
      const auto at = static_cast<size_t>(parameter.logical_index(run.global.begin + i, col));
      logical[at] = stored[static_cast<size_t>(i * cols + col)];
    }
  }
}

std::vector<float> collect_logical(Communicator& tensor, const Stream& stream, const Tensor& flat, const Weight& weight,
                                   const Parameter& parameter) {
  std::vector<float> mine;
  const std::vector<RowRun> runs = contributed(parameter);
  for (const RowRun& run : runs) {
    const int64_t begin = weight.offset + run.local * weight.cols;
    const std::vector<float> values = read_f32(stream, flat, {begin, begin + run.global.size() * weight.cols});
    mine.insert(mine.end(), values.begin(), values.end());
  }
  return collect_runs(tensor, stream, parameter, runs, std::move(mine));
}

std::vector<float> collect_runs(Communicator& group, const Stream& stream, const Parameter& parameter,
                                const std::vector<RowRun>& runs, std::vector<float> values) {
  std::vector<int64_t> bounds = encode(runs);
  if (group.rank() != 0) {
    std::vector<int64_t> sizes = {std::ssize(bounds), std::ssize(values)};
    group.send(stream, view_of(sizes), 0);
    group.send(stream, view_of(bounds), 0);
    group.send(stream, view_of(values), 0);
    return {};
  }
  std::vector<float> logical(static_cast<size_t>(parameter.numel()));
  int64_t rows = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank > 0) {
      std::vector<int64_t> sizes(2);
      group.receive(stream, view_of(sizes), rank);
      bounds.resize(static_cast<size_t>(sizes[0]));
      values.resize(static_cast<size_t>(sizes[1]));
      group.receive(stream, view_of(bounds), rank);
      group.receive(stream, view_of(values), rank);
    }
    std::span<const float> rest = values;
    for (size_t i = 0; i + 1 < bounds.size(); i += 2) {
      const RowRun run{{bounds[i], bounds[i + 1]}, 0};
      const auto n = static_cast<size_t>(run.global.size() * parameter.cols());
      copy_run_to_logical(parameter, run, rest.first(n), logical);
      rest = rest.subspan(n);
      rows += run.global.size();
    }
  }
  INVAR_CHECK(rows == parameter.rows(), "'{}': {} rows of {} collected", parameter.name, rows, parameter.rows());
  return logical;
}

}  // namespace invar
