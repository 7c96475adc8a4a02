#pragma once

#include <memory>

#include "checkpoint/checkpoint_reader.h"
#include "core/exact_sum.h"
#include "data/batch.h"
#include "models/decoder_model.h"
#include "optim/adamw.h"

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
  // Makes where layers get their weights; source: GradientSync.
  using WeightStoreMaker = std::function<std::unique_ptr<WeightStore>(const ParameterTable& table, ValueSource& source,
                                                                      const Stream& stream)>;

  // A capacity per kind of memory; on DeviceType::kMeta they do not matter. weights: ResidentWeights unless given.
  TrainState(const Config& config, const ProcessGroups& groups, const Stream& stream, const MemorySizes& capacity,
             const WeightStoreMaker& weights = {});

  DecoderModel& model() { return model_; }
  // Their values are those of the last update once what reads them is queued after await_values().
  const ParameterTable& parameters() const { return model_.parameters(); }
  // What is queued from now on runs after the values of the last update have come from other ranks.
  void await_values() const { sync_.await_values(); }
  const RowOwnership& ownership() const { return ownership_; }
  const AdamW& optimizer() const { return optimizer_; }
  // Room for hashes, i64 (blocks of all parameters): where scratch begins, so not while a micro-batch runs.
  const Tensor& block_hashes() const {
    INVAR_CHECK(memory_.scratch.used() == 0, "hashes of blocks while {} bytes of scratch are in use",
                memory_.scratch.used());
    return buffers_.block_hashes;
  }
  const Stream& stream() const { return stream_; }

  // After the parameters' values were filled.
  void adopt_values() { optimizer_.adopt_values(stream_); }
  // Takes masters and moments of a checkpoint, which must hold this model: what it owns itself, then the new values of
  // all. Collective over the world.
  void load(const CheckpointReader& reader);
  // The masters and moments that this rank owns, for a checkpoint: all ranks together own every element once.
  StatePart own_part() const;

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

  std::vector<std::string> explain_attention() { return model_.explain_attention(workspace(), on_device()); }

  // A step on tensors as they are; on meta it finds what a step needs.
  void dry_run();
  MemorySizes used() const;  // high-water marks

 private:
  struct Memory {
    Memory(DeviceType device, const MemorySizes& capacity);
    Arena parameters, gradients, optimizer, constants, saved, scratch;
  };
  // What a step reads and writes beside weights and activations.
  struct Buffers {
    Tensor tokens, labels;
    Tensor document_starts;  // undefined without data.reset_at_eod
    Tensor losses;           // f64 (samples of this rank in a step)
    Tensor block_hashes;
    int64_t sequence_length = 0;
    int64_t samples = 0;  // of this rank's, that have a loss
  };

  void allocate_buffers(const Config& config);
  Workspace workspace() { return {stream_, *weights_, *gradients_, memory_.saved, memory_.scratch}; }
  MicroBatch to_device(const Batch& batch);
  Tensor next_losses(const Batch& batch);
  MicroBatch on_device() const {
    return {buffers_.tokens, buffers_.labels, buffers_.sequence_length, buffers_.document_starts};
  }
  void upload(const StatePart& part);

  const ProcessGroups& groups_;
  Stream stream_;
  std::unique_ptr<SumPolicy> sums_;
  Memory memory_;
  DecoderModel model_;
  RowOwnership ownership_;
  GradientSync sync_;
  std::unique_ptr<WeightStore> weights_;
  std::unique_ptr<GradientSink> gradients_;
  std::unique_ptr<GradientNorm> norm_;
  AdamW optimizer_;
  Buffers buffers_;
};

}  // namespace invar
