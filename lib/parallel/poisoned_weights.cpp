#include "parallel/poisoned_weights.h"

#include <algorithm>
#include <limits>

#include "device/device.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

int64_t largest_of(const ParameterTable& table) {
  int64_t largest = 0;
  for (const Weight& weight : table.weights()) largest = std::max(largest, weight.value.numel());
  return largest;
}

int64_t bytes_of(const ParameterTable& table) {
  const auto tensors = std::ssize(table.weights()) + 1;
  return (table.flat_size() + largest_of(table)) * size_of(table.flat_values().dtype()) + tensors * Arena::kAlignment;
}

}  // namespace

PoisonedWeights::PoisonedWeights(const ParameterTable& table, ValueSource* source, const Stream& stream)
    : table_(table),
      source_(source),
      stream_(stream),
      uses_(table.weights().size()),
      memory_("copies of weights", stream.device(), bytes_of(table)) {
  const DType dtype = table.flat_values().dtype();
  nan_ = memory_.allocate("NaN", dtype, {largest_of(table)});
  std::vector<float> nan(static_cast<size_t>(nan_.numel()), std::numeric_limits<float>::quiet_NaN());
  if (dtype == DType::kF32) {
    copy_across(stream, view_of(nan), nan_);
  } else {
    std::vector<BF16> rounded(nan.begin(), nan.end());
    copy_across(stream, view_of(rounded), nan_);
  }
  for (const Weight& weight : table.weights()) {
    const Tensor copy = memory_.allocate("a weight", dtype, {weight.value.numel()});
    copies_.push_back(weight.value.dims() == 1 ? copy : copy.view({weight.rows, weight.cols}));
    poison(copies_.back());
  }
}

HeldWeight PoisonedWeights::use(WeightId id, Pass /*pass*/) {
  const auto index = static_cast<size_t>(id);
  if (uses_[index]++ == 0) {
    if (source_ != nullptr) source_->await_values(id);
    ops::copy(stream_, table_.weight(id).value, copies_[index]);
  }
  return {*this, id, copies_[index]};
}

void PoisonedWeights::release(WeightId id) {
  const auto index = static_cast<size_t>(id);
  if (--uses_[index] == 0) poison(copies_[index]);
}

void PoisonedWeights::poison(const Tensor& copy) const {
  ops::copy(stream_, nan_.rows(0, copy.numel()), copy.view({copy.numel()}));
}

std::unique_ptr<WeightStore> poisoned_weights(const ParameterTable& table, ValueSource& source, const Stream& stream) {
  return std::make_unique<PoisonedWeights>(table, &source, stream);
}

}  // namespace invar
