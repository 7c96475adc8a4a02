#include "train/train_state.h"

#include <algorithm>
#include <map>

#include "checkpoint/hf_weights.h"
#include "ops/elementwise.h"
#include "optim/gradient_norm.h"

namespace invar {
namespace {

DecoderModel::Options options_of(const Config& config) {
  DecoderModel::Options options;
  options.sequence_parallel = config.parallel.sequence && config.parallel.tensor > 1;
  options.recompute = config.train.recompute;
  options.dtype = config.numerics.precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
  options.sequence_length = config.train.sequence_length;
  return options;
}

// The table once it has its layout, on which ownership and optimizer are built.
const ParameterTable& allocated(DecoderModel& model, Arena& parameters, Arena& gradients, Arena& constants) {
  model.allocate(parameters, gradients, constants);
  return model.parameters();
}

}  // namespace

TrainState::TrainState(const Config& config, const ProcessGroups& groups, const Stream& stream,
                       const MemorySizes& capacity)
    : groups_(groups),
      stream_(stream),
      sequence_length_(config.train.sequence_length),
      parameters_("parameters", stream.device(), capacity.parameters),
      gradients_("gradients", stream.device(), capacity.gradients),
      optimizer_memory_("optimizer", stream.device(), capacity.optimizer),
      constants_("constants", stream.device(), capacity.constants),
      saved_("saved activations", stream.device(), capacity.saved),
      scratch_("scratch", stream.device(), capacity.scratch),
      workspace_{stream_, saved_, scratch_},
      model_(decoder_spec(config.model), groups, options_of(config)),
      ownership_(allocated(model_, parameters_, gradients_, constants_), groups.data->size()),
      sync_(model_.parameters(), ownership_, groups),
      optimizer_(model_.parameters(), ownership_, groups.data->rank(), config.optimizer) {
  optimizer_.allocate(optimizer_memory_);
  const int64_t tokens = config.train.micro_batch_size * config.train.sequence_length;
  tokens_ = constants_.allocate("tokens", DType::kI32, {tokens});
  labels_ = constants_.allocate("labels", DType::kI32, {tokens});
  if (config.data.reset_at_eod) document_starts_ = constants_.allocate("document starts", DType::kI32, {tokens});
}

MicroBatch TrainState::to_device(const Batch& batch) {
  INVAR_CHECK(std::ssize(batch.tokens) == tokens_.dim(0), "micro-batch of {} tokens, room for {}", batch.tokens.size(),
              tokens_.dim(0));
  std::copy(batch.tokens.begin(), batch.tokens.end(), tokens_.data<int32_t>());
  std::copy(batch.labels.begin(), batch.labels.end(), labels_.data<int32_t>());
  INVAR_CHECK(batch.document_starts.empty() != document_starts_.defined(),
              "document starts of {} tokens, data.reset_at_eod is {}", batch.document_starts.size(),
              document_starts_.defined());
  if (document_starts_.defined()) {
    std::copy(batch.document_starts.begin(), batch.document_starts.end(), document_starts_.data<int32_t>());
  }
  return on_device();
}

void TrainState::zero_gradients() {
  ops::zero(stream_, parameters().flat_gradients());
}

double TrainState::forward_backward(const Batch& batch, float gradient_scale, TensorSink* sink) {
  return model_.forward_backward(workspace_, to_device(batch), gradient_scale, sink);
}

double TrainState::evaluate(const Batch& batch, TensorSink* sink) {
  return model_.evaluate(workspace_, to_device(batch), sink);
}

double TrainState::finish_gradients() {
  sync_.finish(stream_);
  return gradient_norm(stream_, parameters(), ownership_, groups_);
}

void TrainState::update(int64_t step, double lr, double gradient_scale) {
  optimizer_.update(stream_, step, lr, gradient_scale);
  sync_.publish(stream_);
}

void TrainState::load(const CheckpointReader& reader) {
  const StatePart part = own_part(Copies::kAll);
  reader.require(part.tensors);
  reader.read(part);
  optimizer_.publish_masters(stream_);
  sync_.publish(stream_);
}

StatePart TrainState::own_part(Copies copies) const {
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
  for (const AdamW::OwnState& own : optimizer_.own_states()) {
    const Weight& weight = parameters().weight(own.weight);
    const Range stored{(own.elements.begin - weight.offset) / weight.cols,
                       (own.elements.end - weight.offset) / weight.cols};
    for (const Parameter& parameter : weight.parameters) {
      const size_t tensor = first_tensor.at(&parameter);
      // Whole parameters in turn, so that the copies of many spread over the ranks.
      const bool elsewhere =
          parameter.replicas != nullptr && tensor / 3 % static_cast<size_t>(parameter.replicas->size()) !=
                                               static_cast<size_t>(parameter.replicas->rank());
      if (copies == Copies::kOne && elsewhere) continue;
      for (const RowRun& run : parameter.runs) {
        const int64_t shift = run.global.begin - run.local;  // from rows of storage to rows of the tensor
        const Range rows = intersect(run.global, {stored.begin + shift, stored.end + shift});
        if (rows.empty()) continue;
        const int64_t at = (rows.begin - shift - stored.begin) * weight.cols;
        part.runs.push_back({tensor, rows, own.master.data<float>() + at});
        if (!parameter.trained) continue;
        part.runs.push_back({tensor + 1, rows, own.exp_avg.data<float>() + at});
        part.runs.push_back({tensor + 2, rows, own.exp_avg_sq.data<float>() + at});
      }
    }
  }
  return part;
}

void TrainState::dry_run() {
  model_.forward_backward(workspace_, on_device(), 1.0f);
  finish_gradients();
  update(1, 0.0, 1.0);
}

MemorySizes TrainState::used() const {
  return {parameters_.high_water(), gradients_.high_water(), optimizer_memory_.high_water(),
          constants_.high_water(),  saved_.high_water(),     scratch_.high_water()};
}

namespace {

// A rank without bytes and without peers: the real code runs on it and moves nothing.
struct MetaRank {
  MetaRank(const Config& config, const Topology& topology, int world_rank, TrafficTable* traffic)
      : world(make_recording_communicator(world_rank, topology.world(), "world", traffic)),
        groups(make_process_groups(*world, topology, GroupMaker(traffic))),
        state(config, groups, stream, {}) {}

  std::unique_ptr<Communicator> world;
  ProcessGroups groups;
  Stream stream{DeviceType::kMeta};
  TrainState state;
};

}  // namespace

MemorySizes measure_memory(const Config& config, const Topology& topology, int world_rank, TrafficTable* traffic) {
  TrafficTable ignored;
  MetaRank rank(config, topology, world_rank, traffic != nullptr ? traffic : &ignored);
  rank.state.dry_run();
  return rank.state.used();
}

ParameterCounts count_parameters(const Config& config) {
  Config alone = config;
  alone.parallel.tensor = 1;
  TrafficTable ignored;
  const MetaRank rank(alone, Topology{}, 0, &ignored);
  ParameterCounts counts;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      (parameter.trained ? counts.trained : counts.constant) += parameter.numel();
    }
  }
  return counts;
}

std::vector<StateTensor> checkpoint_tensors(const ModelConfig& model) {
  Config config;
  config.model = model;
  config.train.sequence_length = 1;  // built to name its parameters, not to run
  TrafficTable ignored;
  const MetaRank rank(config, Topology{}, 0, &ignored);
  std::vector<StateTensor> tensors;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      tensors.emplace_back("model", parameter);
      tensors.back().transposed = false;
    }
  }
  return tensors;
}

void check_hf_weights(const Config& config, const Topology& topology, int world_rank, const SafetensorsReader& reader) {
  TrafficTable ignored;
  const MetaRank rank(config, topology, world_rank, &ignored);
  load_hf_weights(rank.state.parameters(), reader);
}

}  // namespace invar
