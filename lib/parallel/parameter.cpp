#include "parallel/parameter.h"

#include <algorithm>

#include "core/integer.h"
#include "core/philox.h"
#include "device/device.h"

namespace invar {
namespace {

int layout_class(const Weight& weight) {
  if (!weight.fully_replicated()) return 2;
  return weight.parameters.front().partial_gradient ? 0 : 1;
}

template <class T>
void fill_rows(const Parameter& parameter, const RowRun& run, int64_t cols, const Philox& random, double std, T* out) {
  for (int64_t i = 0; i < run.global.size(); ++i) {
    const int64_t row = run.global.begin + i;
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t logical_row = parameter.transposed ? col / parameter.column_block : row;
      const auto index = static_cast<uint64_t>(parameter.logical_index(row, col));
      double value = parameter.init == Init::kOnes ? 1.0 : std * random.normal(index);
      if (logical_row == parameter.zero_row) value = 0;
      out[i * cols + col] = static_cast<T>(static_cast<float>(value));
    }
  }
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
  if (!fixed_order()) return id;
  INVAR_CHECK(w.users == 2, "'{}' has {} users, at most 2", w.name, w.users);
  w.second_term = 0;  // allocate() knows where
  return {id, 1};
}

Tensor ParameterTable::gradient(const WeightUse& use, int buffer) const {
  const Weight& w = weight(use.id);
  const int64_t first = use.term == 0 ? w.offset : w.second_term;
  const Tensor flat = gradients(buffer, {first, first + w.rows * w.cols});
  return w.gradient.dims() == 1 ? flat : flat.view({w.rows, w.cols});
}

void ParameterTable::allocate(Arena& values, Arena& gradients, DType dtype, int buffers) {
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
  int64_t with_second_terms = flat_size_;
  for (Weight& w : weights_) {
    if (w.second_term < 0) continue;
    w.second_term = with_second_terms;
    with_second_terms += round_up(w.rows * w.cols, kAlignment);
  }
  for (int buffer = 0; buffer < buffers; ++buffer) {
    gradient_buffers_.push_back(gradients.allocate("gradients", DType::kF32, {with_second_terms}));
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
  const Tensor& values = table.flat_values();
  if (values.is_meta()) return;
  std::vector<std::byte> staging;  // of a run whose place is not host memory
  table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
    const Philox random(seed, RandomPurpose::kWeights, hash_name(parameter.name));
    const Tensor to = values.rows(elements.begin, elements.end);
    const bool staged = to.device() != DeviceType::kCpu;
    if (staged) staging.resize(static_cast<size_t>(to.bytes()));
    void* const first = staged ? staging.data() : to.raw();
    // Rows are independent: split the run over the threads.
#pragma omp parallel for num_threads(stream.threads()) if (stream.threads() > 1)
    for (int64_t i = 0; i < run.global.size(); ++i) {
      const RowRun row{{run.global.begin + i, run.global.begin + i + 1}, 0};
      const int64_t at = i * weight.cols;
      if (values.dtype() == DType::kF32) {
        fill_rows(parameter, row, weight.cols, random, std, static_cast<float*>(first) + at);
      } else {
        fill_rows(parameter, row, weight.cols, random, std, static_cast<BF16*>(first) + at);
      }
    }
    if (staged) copy_across(stream, Tensor(first, to.dtype(), DeviceType::kCpu, to.shape()), to);
  });
}

}  // namespace invar
