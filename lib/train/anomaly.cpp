#include "train/anomaly.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/resolved.h"
#include "parallel/logical_tensor.h"

namespace invar {
namespace {

bool is_finite(const Tensor& tensor) {
  const auto check = [&](auto* values) {
    return std::all_of(values, values + tensor.numel(), [](auto x) { return std::isfinite(static_cast<float>(x)); });
  };
  return tensor.dtype() == DType::kBF16 ? check(tensor.data<BF16>()) : check(tensor.data<float>());
}

// Finds the first layer whose output is not finite on this rank.
class LayerProbe : public TensorSink {
 public:
  explicit LayerProbe(int64_t layers) : first_(layers) {}

  int64_t first() const { return first_; }
  bool wants(std::string_view name) const override { return name.starts_with(kHidden); }
  void record(const std::string& name, const Tensor& local, int64_t) override {
    const int64_t layer = std::stoll(name.substr(kHidden.size()));
    if (layer < first_ && !is_finite(local)) first_ = layer;
  }

 private:
  static constexpr std::string_view kHidden = "hidden.";
  int64_t first_;
};

// The last weight, in the order of the model, with a gradient that is not finite among what this rank owns; −1: none.
int64_t last_bad_gradient(const TrainState& state) {
  const ParameterTable& table = state.parameters();
  int64_t last = -1;
  for (const RowOwnership::Piece& piece : state.ownership().pieces()) {
    if (piece.weight <= last) continue;
    std::vector<float> gradient = read_f32(state.stream(), table.flat_gradients(), piece.elements);
    if (!is_finite(view_of(gradient))) last = piece.weight;
  }
  return last;
}

}  // namespace

std::optional<double> SpikeDetector::add(double loss) {
  if (threshold_ <= 0 || !std::isfinite(loss)) return std::nullopt;
  std::optional<double> spike;
  if (losses_.size() >= kLeast) {
    const auto n = static_cast<double>(losses_.size());
    const double mean = std::accumulate(losses_.begin(), losses_.end(), 0.0) / n;
    const double squares = std::accumulate(losses_.begin(), losses_.end(), 0.0,
                                           [=](double sum, double x) { return sum + (x - mean) * (x - mean); });
    const double z = (loss - mean) / std::sqrt(squares / n);
    if (z > threshold_) spike = z;  // not if all losses were equal: NaN
  }
  losses_.push_back(loss);
  if (losses_.size() > kWindow) losses_.pop_front();
  return spike;
}

std::string LeftOutSteps::why(const StepResult& result) const {
  if (result.tokens == 0) {
    return format("none of its tokens counts, as data.eod_mask_loss leaves out those after data.eod_id = {}",
                  config_.data.eod_id);
  }
  if (result.nonfinite.empty()) return "";
  return format("loss {} with gradient norm {}: not finite, {}", result.loss, result.grad_norm, result.nonfinite);
}

std::optional<Error> LeftOutSteps::add(const StepResult& result) {
  if (result.tokens == 0) {
    if (++empty_in_a_row_ <= kMostInARow) return std::nullopt;
    return Error(ErrorKind::kData, format("{}; the {} steps before it neither", why(result), empty_in_a_row_ - 1),
                 "look whether the data is of this tokenizer and data.eod_id its end of a document, or set "
                 "data.eod_mask_loss: false");
  }
  empty_in_a_row_ = 0;
  nonfinite_in_a_row_ = result.nonfinite.empty() ? 0 : nonfinite_in_a_row_ + 1;
  const bool stops = config_.train.on_nonfinite == NonfinitePolicy::kStop;
  if (nonfinite_in_a_row_ <= (stops ? 0 : kMostInARow)) return std::nullopt;
  const std::string what = why(result) + "; this step changed no weights";
  if (nonfinite_in_a_row_ > 1) {
    return Error(ErrorKind::kFault, format("{}; the {} steps before it neither", what, nonfinite_in_a_row_ - 1),
                 "the weights are lost: resume from an earlier checkpoint with a lower optimizer.lr");
  }
  return Error(ErrorKind::kFault, what,
               "lower optimizer.lr, lengthen schedule.warmup_steps, look at the data of this step, or leave such steps "
               "out with train.on_nonfinite: skip");
}

std::string nonfinite_origin(TrainState& state, const ProcessGroups& groups, std::span<const Batch> batches,
                             int64_t layers, double loss) {
  LayerProbe probe(layers);
  for (const Batch& batch : batches) state.evaluate(batch, &probe);
  state.take_loss();
  const int64_t layer = all_reduce_value(*groups.world, probe.first(), ReduceOp::kMin);
  if (layer < layers) return format("first in the output of decoder layer {}", layer);
  if (!std::isfinite(loss)) return "in the final norm or the head, all layers being finite";
  const int64_t weight = all_reduce_value(*groups.world, last_bad_gradient(state), ReduceOp::kMax);
  if (weight < 0) return "in the sum of the squared gradients, each being finite";
  return format("the forward pass is finite; in backward first in the gradient of {}",
                state.parameters().weight(static_cast<WeightId>(weight)).name);
}

}  // namespace invar
