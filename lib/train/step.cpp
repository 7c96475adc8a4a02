#include "train/step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "config/resolved.h"
#include "optim/lr_schedule.h"
#include "train/anomaly.h"

namespace invar {
namespace {

int64_t counted_labels(const Batch& batch) {
  return std::count_if(batch.labels.begin(), batch.labels.end(), [](int32_t label) { return label >= 0; });
}

int64_t count_tokens(const ProcessGroups& groups, std::span<const Batch> batches) {
  int64_t tokens = 0;
  for (const Batch& batch : batches) tokens += counted_labels(batch);
  return sum_over_readers(groups, tokens);
}

// This data-parallel rank's micro-batches of a global batch, without those that hold no sample before position `end`.
// Samples from there on have no label that counts.
std::vector<Batch> load_batches(const Config& config, const ProcessGroups& groups, const DataStream& data, int64_t step,
                                int64_t end) {
  BatchGeometry geometry;
  geometry.global_batch = global_batch_size(config, groups.world->size());
  geometry.micro_batch = config.train.micro_batch_size;
  geometry.own = groups.topology.samples_of(geometry.global_batch, groups.reader());
  geometry.first_sample = data.first_sample;
  const DocumentRules documents{static_cast<int32_t>(config.data.eod_id), config.data.eod_mask_loss,
                                config.data.reset_at_eod};
  std::vector<Batch> batches;
  for (; geometry.micro_step < geometry.own.size() / geometry.micro_batch; ++geometry.micro_step) {
    const int64_t first = data.first_sample + step * geometry.global_batch + geometry.own.begin +
                          geometry.micro_step * geometry.micro_batch;
    if (first >= end) break;
    load_micro_batch(data.source, data.sampler, step, geometry, batches.emplace_back(), documents);
    const int64_t samples = std::min(geometry.micro_batch, end - first);
    std::vector<int32_t>& labels = batches.back().labels;
    std::fill(labels.begin() + samples * config.train.sequence_length, labels.end(), -1);
  }
  return batches;
}

}  // namespace

TokenRequest token_request(const Config& config, Split split, int world_size) {
  TokenRequest request;
  request.split = split;
  request.sequence_length = config.train.sequence_length;
  request.vocab_size = config.data.mock_vocab_size > 0 ? config.data.mock_vocab_size : config.model.vocab_size;
  request.seed = config.train.seed;
  const int64_t batches = split == Split::kTrain ? config.train.steps : config.train.eval_batches;
  request.samples_wanted = batches * global_batch_size(config, world_size);
  request.once = split == Split::kValidation;
  return request;
}

DataStream data_stream(const TokenSource& source, const Config& config, Split split) {
  return {source, Sampler(sample_order(config.data, split), source.samples(), config.train.seed), 0};
}

std::vector<Batch> load_micro_batches(const Config& config, const ProcessGroups& groups, const DataStream& data,
                                      int64_t step) {
  return load_batches(config, groups, data, step, std::numeric_limits<int64_t>::max());
}

StepResult run_step(TrainState& state, const Config& config, const ProcessGroups& groups,
                    std::span<const Batch> batches, int64_t step, const StepHooks& hooks) {
  StepResult result;
  result.tokens = count_tokens(groups, batches);
  const double share = 1.0 / static_cast<double>(std::max<int64_t>(1, result.tokens));

  state.zero_gradients();
  const bool sums_beside = hooks.work == nullptr || state.stream().device() == DeviceType::kCuda;
  if (hooks.work != nullptr) {
    state.await_values();
    hooks.work->start(state.stream());
  }
  for (const Batch& batch : batches) {
    const bool last = &batch == &batches.back();
    state.forward_backward(batch, static_cast<float>(share), hooks.sink,
                           last && sums_beside ? TrainState::Turn::kLast : TrainState::Turn::kMore);
  }
  if (hooks.work != nullptr) hooks.work->stop(state.stream());
  result.grad_norm = state.finish_gradients();
  const double loss_sum = sum_over_readers(groups, state.take_loss());
  result.loss = result.tokens > 0 ? loss_sum * share : std::numeric_limits<double>::quiet_NaN();
  if (hooks.gradients_complete) hooks.gradients_complete(result);
  result.lr = learning_rate(config.schedule, config.optimizer.lr, decay_steps(config), step + 1);
  if (result.tokens == 0) return result;
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    result.nonfinite = nonfinite_origin(state, groups, batches, config.model.num_hidden_layers, result.loss);
    return result;
  }
  state.update(step + 1, result.lr, clip_coefficient(result.grad_norm, config.optimizer.clip_grad));
  return result;
}

int64_t evaluation_samples(const Config& config, const TokenSource& source, int world_size) {
  return std::min(source.samples(), config.train.eval_batches * global_batch_size(config, world_size));
}

std::optional<Evaluation> run_evaluation(TrainState& state, const Config& config, const ProcessGroups& groups,
                                         const DataStream& data, const std::function<bool()>& stop) {
  Evaluation result;
  result.samples = evaluation_samples(config, data.source, groups.world->size());
  const int64_t batch_size = global_batch_size(config, groups.world->size());
  const int64_t end = data.first_sample + result.samples;
  ExactSum loss_sum;
  for (int64_t step = 0; step * batch_size < result.samples; ++step) {
    for (const Batch& batch : load_batches(config, groups, data, step, end)) {
      state.evaluate(batch);
      result.tokens += counted_labels(batch);
    }
    loss_sum.add(state.take_loss());
    if (stop && stop()) return std::nullopt;
  }
  result.tokens = sum_over_readers(groups, result.tokens);
  const double sum = sum_over_readers(groups, loss_sum);
  if (result.tokens > 0) result.loss = sum / static_cast<double>(result.tokens);
  return result;
}

}  // namespace invar
