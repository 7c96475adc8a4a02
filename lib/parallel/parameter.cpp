#include "parallel/parameter.h"

#include <algorithm>

#include "core/integer.h"
#include "core/philox.h"
#include "ops/random_normal.h"

namespace invar {
namespace {

int layout_class(const Weight& weight) {
  if (!weight.fully_replicated()) return 2;
  return weight.parameters.front().partial_gradient ? 0 : 1;
}

}  // namespace

bool Weight::fully_replicated() const {
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const Parameter& p) { return p.replicas != nullptr && p.shape.size() == 1; });
}

int64_t Weight::logical_elements() const {
  int64_t elements = 0;
  for (const Parameter& parameter : parameters) elements += parameter.numel();
  return elements;
}

WeightId ParameterTable::add(Weight weight) {
  INVAR_CHECK(!flat_values_.defined(), "weight '{}' added after allocation", weight.name);
  for (const Parameter& parameter : weight.parameters) {
    INVAR_CHECK(parameter.cols() == weight.cols, "'{}' has {} columns in a weight of {}", parameter.name,
                parameter.cols(), weight.cols);
    for (const RowRun& run : parameter.runs) {
      INVAR_CHECK(0 <= run.global.begin && run.global.end <= parameter.rows() && run.local >= 0 &&
                      run.local + run.global.size() <= weight.rows,
                  "'{}': rows [{}, {}) at {} do not fit", parameter.name, run.global.begin, run.global.end, run.local);
    }
  }
  weights_.push_back(std::move(weight));
  return static_cast<WeightId>(weights_.size()) - 1;
}

WeightUse ParameterTable::add_user(WeightId id) {
  Weight& w = weights_[static_cast<size_t>(id)];
  ++w.users;
  INVAR_CHECK(w.users == 2, "'{}' has {} users, at most 2", w.name, w.users);
  return {id, 1};
}

Tensor ParameterTable::gradient(const WeightUse& use, int buffer) const {
  const Weight& w = weight(use.id);
  const int64_t first = use.user == 0 || w.second_user < 0 ? w.offset : w.second_user;
  return shaped(use.id, gradients(buffer, {first, first + w.rows * w.cols}));
}

Tensor ParameterTable::shaped(WeightId id, const Tensor& flat) const {
  const Weight& w = weight(id);
  return w.gradient.dims() == 1 ? flat : flat.view({w.rows, w.cols});
}

void ParameterTable::allocate(Arena& values, Arena& gradients, DType dtype, const GradientLayout& layout) {
  for (WeightId id = 0; id < static_cast<WeightId>(weights_.size()); ++id) layout_.push_back(id);
  std::stable_sort(layout_.begin(), layout_.end(),
                   [&](WeightId a, WeightId b) { return layout_class(weight(a)) < layout_class(weight(b)); });
  for (const WeightId id : layout_) {
    Weight& w = weights_[static_cast<size_t>(id)];
    w.offset = flat_size_;
    // As tensors, so that sizes that cannot be addressed are refused before they overflow.
    const Tensor whole(nullptr, DType::kF32, DeviceType::kMeta, {w.rows, w.cols});
    flat_size_ += round_up(whole.numel(), kAlignment);
    (void)Tensor(nullptr, DType::kF32, DeviceType::kMeta, {flat_size_});
  }
  flat_values_ = values.allocate("parameters", dtype, {flat_size_});
  int64_t with_second_users = flat_size_;
  for (Weight& w : weights_) {
    if (!layout.separate_users || w.users < 2) continue;
    w.second_user = with_second_users;
    with_second_users += round_up(w.rows * w.cols, kAlignment);
  }
  for (int buffer = 0; buffer < layout.buffers; ++buffer) {
    gradient_buffers_.push_back(gradients.allocate("gradients", DType::kF32, {with_second_users}));
  }
  flat_gradients_ = gradient_buffers_[0].rows(0, flat_size_);
  for (Weight& w : weights_) {
    w.value = flat_values_.rows(w.offset, w.offset + w.rows * w.cols);
    w.gradient = flat_gradients_.rows(w.offset, w.offset + w.rows * w.cols);
    const bool vector = w.parameters.front().shape.size() == 1;
    if (!vector) {
      w.value = w.value.view({w.rows, w.cols});
      w.gradient = w.gradient.view({w.rows, w.cols});
    }
  }
}

void ParameterTable::for_each_run(const RunVisitor& visit) const {
  for (const WeightId id : layout_) {
    const Weight& w = weight(id);
    for (const Parameter& parameter : w.parameters) {
      for (const RowRun& run : parameter.runs) {
        const int64_t begin = w.offset + run.local * w.cols;
        visit(w, parameter, run, {begin, begin + run.global.size() * w.cols});
      }
    }
  }
}

void initialise(const ParameterTable& table, const Stream& stream, uint64_t seed, double std) {
  table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
    ops::NormalValues values{Philox(seed, RandomPurpose::kWeights, hash_name(parameter.name)), 0.0, std,
                             parameter.logical_index().from_row(run.global.begin)};
    if (parameter.init == Init::kOnes) {
      values.mean = 1.0;
      values.std = 0.0;
    }
    if (parameter.zero_row >= 0) {
      const int64_t width = parameter.shape.size() == 1 ? 1 : parameter.shape[1];
      values.zeros = {parameter.zero_row * width, (parameter.zero_row + 1) * width};
    }
    const Tensor out = table.flat_values().rows(elements.begin, elements.end);
    ops::random_normal(stream, values, out.view({run.global.size(), weight.cols}));
  });
}

}  // namespace invar
