#pragma once

#include <memory>
#include <optional>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/hf_weights.h"
#include "core/exact_sum.h"
#include "data/batch.h"
#include "models/decoder_model.h"
#include "optim/adamw.h"
#include "optim/gradient_norm.h"

namespace invar {

// Bytes of each kind of memory of one rank.
struct MemorySizes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t constants = 0;  // RoPE tables, the micro-batch
  int64_t saved = 0;      // activations kept for backward
  int64_t scratch = 0;    // activations and gradients of one layer, logits of one chunk; hashes of the state
  int64_t proofs = 0;     // not in arenas: what the largest proof of ops/proofs.h takes on a GPU, and gives back

  // Of the arenas.
  int64_t total() const { return parameters + gradients + optimizer + constants + saved + scratch; }
};

// What workspaces and the libraries take on a GPU beside arenas and proofs: above all the backward pass of attention,
// of cuDNN up to 2.5 GiB, and NCCL.
constexpr int64_t kOutsideArenas = int64_t{3} << 30;

// Everything of a run that lives on one rank's device: weights, gradients, optimizer state, and the stacks that a step
// works in, all allocated in the constructor. Collective over the world.
class TrainState {
 public:
  // A capacity per kind of memory; on DeviceType::kMeta they do not matter.
  TrainState(const Config& config, const ProcessGroups& groups, const Stream& stream, const MemorySizes& capacity);

  DecoderModel& model() { return model_; }
  // With the values of the last update.
  const ParameterTable& parameters() const {
    await_values();
    return model_.parameters();
  }
  // What is queued from now on runs after the values of the last update have come from other ranks.
  void await_values() const { sync_.await_values(); }
  const RowOwnership& ownership() const { return ownership_; }
  const AdamW& optimizer() const { return optimizer_; }
  // Room for hashes, i64 (blocks of all parameters): where scratch begins, so not while a micro-batch runs.
  const Tensor& block_hashes() const {
    INVAR_CHECK(scratch_.used() == 0, "hashes of blocks while {} bytes of scratch are in use", scratch_.used());
    return block_hashes_;
  }
  // The one that was given, invariant if the config's numerics are.
  const Stream& stream() const { return stream_; }

  // After the parameters' values were filled.
  void adopt_values() { optimizer_.adopt_values(stream_); }
  // Takes masters and moments of a checkpoint, which must hold this model: what it owns itself, then the new values of
  // all. Collective over the world.
  void load(const CheckpointReader& reader);

  // The masters and moments that this rank owns, for a checkpoint. With kOne the runs of all ranks together hold every
  // element once: copies on several ranks are shared out among them. With kAll they are all that a rank must be given.
  enum class Copies { kAll, kOne };
  StatePart own_part(Copies copies) const;

  void zero_gradients();
  // Adds the micro-batch's Σ loss to what take_loss() will give, and the gradient of gradient_scale times it. In the
  // step's last micro-batch the sums over ranks run beside the backward pass.
  enum class Turn : uint8_t { kMore, kLast };
  void forward_backward(const Batch& batch, float gradient_scale, TensorSink* sink = nullptr, Turn turn = Turn::kMore);
  void evaluate(const Batch& batch, TensorSink* sink = nullptr);
  // Σ loss of the micro-batches since it was last taken: at most those of one step. Waits for the device.
  ExactSum take_loss();
  // Completes the gradients over all ranks; returns their global norm.
  double finish_gradients();
  // AdamW update `step` (from 1) and the new values to every rank that holds them.
  void update(int64_t step, double lr, double gradient_scale);

  std::vector<std::string> explain_attention() { return model_.explain_attention(workspace_, on_device()); }

  // A step on tensors as they are; on meta it finds what a step needs.
  void dry_run();
  MemorySizes used() const;  // high-water marks

 private:
  void upload(const StatePart& part);
  MicroBatch to_device(const Batch& batch);
  Tensor next_losses(const Batch& batch);
  MicroBatch on_device() const { return {tokens_, labels_, sequence_length_, document_starts_}; }

  const ProcessGroups& groups_;
  Stream stream_;
  int64_t sequence_length_;
  std::optional<NumericsContract> contract_;  // of sums in fixed order
  std::optional<WorkerOrder> order_;
  Arena parameters_;
  Arena gradients_;
  Arena optimizer_memory_;
  Arena constants_;
  Arena saved_;
  Arena scratch_;
  Workspace workspace_;
  DecoderModel model_;
  RowOwnership ownership_;
  GradientSync sync_;
  AdamW optimizer_;
  std::vector<Range> counted_;               // of the flat gradients, in their norm
  std::vector<ops::RowBlock> counted_rows_;  // the same, in fixed order
  Tensor loss_sums_;                         // f64 (samples of this rank in a step)
  int64_t samples_ = 0;                      // of them that have one
  Tensor squares_;                           // f64 (1): of the gradients
  RowSquares row_squares_;                   // in fixed order
  Tensor block_hashes_;
  Tensor tokens_;
  Tensor labels_;
  Tensor document_starts_;  // undefined without data.reset_at_eod
};

// The grid of the ranks that train, uniform for replicas of one width, with one exception. If their tensor ranks are
// very unequal, the owners of a row's copies would add its terms in different orders, and the copies would drift apart.
// Then a row has one owner, as among replicas of unequal widths. config: with the plan's batch. Not collective.
Topology training_topology(const Config& config, const ReplicaPlan& plan);

// What a rank needs on a device of the given kind, found by running one step of the real code on meta tensors.
// `traffic`, if given, receives what the rank sends in one micro-step and the step's end. Not collective.
MemorySizes measure_memory(const Config& config, const Topology& topology, int world_rank,
                           DeviceType target = DeviceType::kCpu, TrafficTable* traffic = nullptr);

// Elements of the whole model, at any layout.
struct ParameterCounts {
  int64_t trained = 0;
  int64_t constant = 0;  // of the checkpoint, applied but not trained
};
ParameterCounts count_parameters(const Config& config);

// The model's parameters as a checkpoint names them, all rows as they lie in files; for a writer without a run.
std::vector<StateTensor> checkpoint_tensors(const ModelConfig& model);

// Refuses weights that load_hf_weights() would refuse, without memory for them. Not collective.
void check_hf_weights(const Config& config, const Topology& topology, int world_rank, const HfWeights& weights);

}  // namespace invar
