#include <map>
#include <utility>

#include "device/device.h"
#include "train/train_state.h"

namespace invar {
namespace {

// The optimizer's state as host pointers: to itself on the CPU, else to a copy.
struct HostState {
  struct Own {
    WeightId weight;
    Range elements;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
  };

  HostState(const Stream& stream, const std::vector<AdamW::OwnState>& owned) {
    int64_t total = 0;
    for (const AdamW::OwnState& own : owned) total += 3 * own.elements.size();
    if (stream.device() == DeviceType::kCuda) {
      values = std::make_shared<std::vector<float>>();
      resize_copy(*values, total);
    }
    float* next = values != nullptr ? values->data() : nullptr;
    const auto in_host = [&](const Tensor& tensor) {
      if (next == nullptr) return tensor.data<float>();
      float* const at = std::exchange(next, next + tensor.numel());
      copy_across(stream, tensor, Tensor(at, DType::kF32, DeviceType::kCpu, tensor.shape()));
      return at;
    };
    for (const AdamW::OwnState& own : owned) {
      float* const master = in_host(own.master);
      float* const exp_avg = in_host(own.exp_avg);
      states.push_back({own.weight, own.elements, master, exp_avg, in_host(own.exp_avg_sq)});
    }
  }

  std::shared_ptr<std::vector<float>> values;  // of the copy
  std::vector<Own> states;
};

}  // namespace

StatePart TrainState::own_part() const {
  StatePart part;
  std::map<const Parameter*, size_t> first_tensor;  // master, then the moments if it has some
  for (const Weight& weight : parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      first_tensor[&parameter] = part.tensors.size();
      part.tensors.emplace_back("model", parameter);
      if (!parameter.trained) continue;
      part.tensors.emplace_back("optimizer/exp_avg", parameter);
      part.tensors.emplace_back("optimizer/exp_avg_sq", parameter);
    }
  }
  const HostState host(stream_, optimizer_.own_states());
  part.host_copy = host.values;
  for (const OwnedRows& own : ownership_.owned_rows()) {
    const HostState::Own& piece = host.states[own.piece];
    const size_t tensor = first_tensor.at(own.parameter);
    const int64_t at = own.elements.begin - piece.elements.begin;
    part.runs.push_back({tensor, own.rows, piece.master + at});
    if (!own.parameter->trained) continue;
    part.runs.push_back({tensor + 1, own.rows, piece.exp_avg + at});
    part.runs.push_back({tensor + 2, own.rows, piece.exp_avg_sq + at});
  }
  return part;
}

void TrainState::load(const CheckpointReader& reader) {
  const StatePart part = own_part();
  reader.require(part.tensors);
  reader.read(part, stream_.threads());
  upload(part);
  optimizer_.publish_masters(stream_);
  for (size_t b = 0; b < ownership_.buckets().size(); ++b) sync_.publish(b);
}

// The whole host copy back to the device.
void TrainState::upload(const StatePart& part) {
  if (part.host_copy == nullptr) return;
  float* next = part.host_copy->data();
  for (const AdamW::OwnState& own : optimizer_.own_states()) {
    for (const Tensor& tensor : {own.master, own.exp_avg, own.exp_avg_sq}) {
      copy_across(stream_, Tensor(next, DType::kF32, DeviceType::kCpu, tensor.shape()), tensor);
      next += tensor.numel();
    }
  }
}

}  // namespace invar
