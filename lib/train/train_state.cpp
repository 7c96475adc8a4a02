#include "train/train_state.h"

#include "config/resolved.h"
#include "config/validation.h"
#include "device/device.h"
#include "ops/block_hashes.h"
#include "ops/elementwise.h"
#include "train/rank_layouts.h"
#include "train/run_contract.h"

namespace invar {
namespace {

// The policy of numerics.reduction, with the order of this rank's samples.
std::unique_ptr<SumPolicy> sums_of(const Config& config, const ProcessGroups& groups, const Stream& stream) {
  const std::optional<NumericsContract> contract = run_contract(config, stream);
  if (!contract) return fast_sums();
  static_assert(kMostMicroBatch == ops::kMostSamples);
  const int64_t batch = global_batch_size(config, groups.world->size());
  std::vector<Range> samples;
  for (int reader = 0; reader < groups.topology.readers(); ++reader) {
    samples.push_back(groups.topology.samples_of(batch, reader));
  }
  WorkerOrder order(contract->workers, batch, samples, groups.reader(), config.train.micro_batch_size);
  return invariant_sums(*contract, std::move(order), stream);
}

DecoderModel::Options options_of(const Config& config, const ProcessGroups& groups) {
  DecoderModel::Options options;
  options.sequence_parallel = config.parallel.sequence && groups.topology.tensor > 1;
  options.recompute = config.train.recompute;
  options.dtype = config.numerics.precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
  if (config.numerics.tensor_reduce_dtype == Precision::kBF16) options.reduce_dtype = DType::kBF16;
  options.sequence_length = config.train.sequence_length;
  return options;
}

RowOwnership ownership_of(const Config& config, const ParameterTable& table, const ProcessGroups& groups,
                          const SumPolicy& sums) {
  const Topology& topology = groups.topology;
  const int64_t bucket_elements = config.parallel.bucket_size * topology.tensor;
  if (topology.uniform()) return {table, topology.replicas(), groups.replica(), bucket_elements};
  const RankLayouts layouts(decoder_spec(config.model), topology, sums, options_of(config, groups));
  return {topology, layouts.tables(), groups.world->rank(), table, bucket_elements};
}

int64_t hash_blocks_of(const ParameterTable& table) {
  int64_t blocks = 0;
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) blocks += hash_blocks(parameter.numel());
  }
  return blocks;
}

}  // namespace

TrainState::Memory::Memory(DeviceType device, const MemorySizes& capacity)
    : parameters("parameters", device, capacity.parameters),
      gradients("gradients", device, capacity.gradients),
      optimizer("optimizer", device, capacity.optimizer),
      constants("constants", device, capacity.constants),
      saved("saved activations", device, capacity.saved),
      scratch("scratch", device, capacity.scratch) {}

TrainState::TrainState(const Config& config, const ProcessGroups& groups, const Stream& stream,
                       const MemorySizes& capacity, const WeightStoreMaker& weights)
    : groups_(groups),
      stream_(stream),
      sums_(sums_of(config, groups, stream)),
      memory_(stream.device(), capacity),
      model_(decoder_spec(config.model), groups, *sums_, options_of(config, groups),
             {stream_, memory_.parameters, memory_.gradients, memory_.constants}),
      ownership_(ownership_of(config, model_.parameters(), groups, *sums_)),
      sync_(model_.parameters(), ownership_, groups, stream_, *sums_, memory_.gradients),
      weights_(weights ? weights(model_.parameters(), sync_, stream_)
                       : std::make_unique<ResidentWeights>(model_.parameters(), &sync_)),
      gradients_(sums_->gradients(model_.parameters(), sync_)),
      norm_(sums_->norm(ownership_, memory_.constants)),
      optimizer_(model_.parameters(), ownership_, config.optimizer, memory_.optimizer) {
  allocate_buffers(config);
}

void TrainState::allocate_buffers(const Config& config) {
  const int64_t tokens = config.train.micro_batch_size * config.train.sequence_length;
  const int64_t batch = global_batch_size(config, groups_.world->size());
  const int64_t own_samples = groups_.topology.samples_of(batch, groups_.reader()).size();
  Arena& constants = memory_.constants;
  buffers_.sequence_length = config.train.sequence_length;
  buffers_.losses = constants.allocate("losses", DType::kF64, {own_samples});
  buffers_.tokens = constants.allocate("tokens", DType::kI32, {tokens});
  buffers_.labels = constants.allocate("labels", DType::kI32, {tokens});
  if (config.data.reset_at_eod) {
    buffers_.document_starts = constants.allocate("document starts", DType::kI32, {tokens});
  }
  const ArenaScope given_back(memory_.scratch);
  buffers_.block_hashes =
      memory_.scratch.allocate("hashes of blocks", DType::kI64, {hash_blocks_of(model_.parameters())});
}

MicroBatch TrainState::to_device(const Batch& batch) {
  INVAR_CHECK(std::ssize(batch.tokens) == buffers_.tokens.dim(0), "micro-batch of {} tokens, room for {}",
              batch.tokens.size(), buffers_.tokens.dim(0));
  const auto give = [&](const std::vector<int32_t>& ids, const Tensor& to) {
    std::vector<int32_t> from = ids;
    copy_across(stream_, view_of(from), to);
  };
  give(batch.tokens, buffers_.tokens);
  give(batch.labels, buffers_.labels);
  INVAR_CHECK(batch.document_starts.empty() != buffers_.document_starts.defined(),
              "document starts of {} tokens, data.reset_at_eod is {}", batch.document_starts.size(),
              buffers_.document_starts.defined());
  if (buffers_.document_starts.defined()) {
    give(batch.document_starts, buffers_.document_starts);
  }
  return on_device();
}

void TrainState::zero_gradients() {
  // Workers clear the other buffers. What nobody adds to (constants, padding) is as the arena was made there: zero.
  ops::zero(stream_, model_.parameters().gradients(0));
}

// Where the losses of its samples go.
Tensor TrainState::next_losses(const Batch& batch) {
  const int64_t samples = std::ssize(batch.tokens) / buffers_.sequence_length;
  return buffers_.losses.rows(buffers_.samples, buffers_.samples + samples);
}

void TrainState::forward_backward(const Batch& batch, float gradient_scale, TensorSink* sink, Turn turn) {
  if (turn == Turn::kLast) sync_.begin_last_micro_batch();
  const Tensor losses = next_losses(batch);
  model_.forward_backward(workspace(), to_device(batch), gradient_scale, losses, buffers_.samples, sink);
  buffers_.samples += losses.dim(0);
}

void TrainState::evaluate(const Batch& batch, TensorSink* sink) {
  const Tensor losses = next_losses(batch);
  model_.evaluate(workspace(), to_device(batch), losses, sink);
  buffers_.samples += losses.dim(0);
}

ExactSum TrainState::take_loss() {
  std::vector<double> losses(static_cast<size_t>(buffers_.losses.dim(0)));
  copy_across(stream_, buffers_.losses, view_of(losses));
  ops::zero(stream_, buffers_.losses);
  buffers_.samples = 0;
  ExactSum sum;
  for (const double loss : losses) sum.add(loss);
  return sum;
}

double TrainState::finish_gradients() {
  set_phase(stream_, "sums and norm of the gradients");
  sync_.finish();
  const double norm = norm_->of(stream_, parameters().flat_gradients(), *groups_.world);
  set_phase(stream_, "");
  return norm;
}

void TrainState::update(int64_t step, double lr, double gradient_scale) {
  set_phase(stream_, "optimizer");
  optimizer_.update(stream_, step, lr, gradient_scale, [this](size_t bucket) { sync_.publish(bucket); });
  set_phase(stream_, "");
}

void TrainState::dry_run() {
  sync_.begin_last_micro_batch();
  const int64_t samples = buffers_.tokens.dim(0) / buffers_.sequence_length;
  model_.forward_backward(workspace(), on_device(), 1.0f, buffers_.losses.rows(0, samples));
  finish_gradients();
  update(1, 0.0, 1.0);
}

MemorySizes TrainState::used() const {
  return {memory_.parameters.high_water(),
          memory_.gradients.high_water(),
          memory_.optimizer.high_water(),
          memory_.constants.high_water(),
          memory_.saved.high_water(),
          memory_.scratch.high_water(),
          sums_->proof_bytes()};
}

}  // namespace invar
