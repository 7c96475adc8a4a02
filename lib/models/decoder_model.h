#pragma once

#include <map>
#include <memory>
#include <vector>

#include "config/config.h"
#include "layers/lm_head.h"
#include "models/decoder_layer.h"

namespace invar {

// What a pass works with: where weights come from and gradients go, and the stacks for activations.
struct Workspace {
  const Stream& stream;
  WeightStore& weights;
  GradientSink& gradients;
  Arena& saved;
  Arena& scratch;
};

// A micro-batch of T = samples · sequence_length tokens, whole on every rank of the tensor group.
struct MicroBatch {
  Tensor tokens;  // i32 (T)
  Tensor labels;  // i32 (T); negative: not counted
  int64_t sequence_length = 0;
  // i32 (T): attention and positions start anew at these tokens, see ops::AttentionParams. Undefined: a sample is one
  // document.
  Tensor document_starts{};
};

// The one transformer: embedding, decoder layers as the spec describes them, final norm, head with loss.
//
// Construct; fill the parameters (initialise or load); then passes in any order. The constructor is collective over the
// tensor group.
class DecoderModel {
 public:
  struct Options {
    bool sequence_parallel = false;
    RecomputeKind recompute = RecomputeKind::kNone;
    DType dtype = DType::kF32;         // of parameters and activations
    DType reduce_dtype = DType::kF32;  // of partial sums of activations over the tensor group
    int64_t sequence_length = 0;
  };

  // Where parameters, gradients and constants (RoPE tables) are allocated.
  struct Memory {
    const Stream& stream;
    Arena& parameters;
    Arena& gradients;
    Arena& constants;
  };

  // groups and sums outlive the model.
  DecoderModel(const DecoderSpec& spec, const ProcessGroups& groups, const SumPolicy& sums, const Options& options,
               const Memory& memory);
  DecoderModel(const DecoderModel&) = delete;
  DecoderModel& operator=(const DecoderModel&) = delete;

  const ParameterTable& parameters() const { return table_; }

  // A sink is offered, where L is a layer: "hidden.L", its output (local, C); "logits" f32 (n, rows of vocabulary()), a
  // chunk of tokens at a time; and in backward "d_kv.L" f32 (T, Hkv·2·D), the gradient of the keys and values that L
  // shares, after L has added its own.
  //
  // Adds Σ loss over each sample's counted tokens, the same on every rank of the tensor group, to loss_sums f64
  // (samples).
  void evaluate(const Workspace& workspace, const MicroBatch& batch, const Tensor& loss_sums,
                TensorSink* sink = nullptr);
  // The same, and adds the gradient of gradient_scale · Σ loss to the weights' gradients. first_sample: where the
  // micro-batch's samples are among this rank's of the step.
  void forward_backward(const Workspace& workspace, const MicroBatch& batch, float gradient_scale,
                        const Tensor& loss_sums, int64_t first_sample = 0, TensorSink* sink = nullptr);

  // How each layer's attention is computed on such a micro-batch, for a person: "layers 0 to 27: cudnn", a line for
  // each run of layers that are alike.
  std::vector<std::string> explain_attention(const Workspace& workspace, const MicroBatch& batch);

  // Padded vocabulary rows of this rank: the columns of the "logits" that a sink gets.
  Range vocabulary() const { return head_->vocabulary(); }

 private:
  void allocate(const Memory& memory);
  LayerContext context(const Workspace& workspace, const MicroBatch& batch, TensorSink* sink, bool keep = false);
  // Runs all layers; keeps what backward needs if `keep`. Returns the final residual stream.
  Tensor forward_layers(const LayerContext& ctx, const MicroBatch& batch, bool keep);
  void backward_layers(const LayerContext& ctx, const MicroBatch& batch, const Tensor& d_h);
  void allocate_shared(const LayerContext& ctx, bool with_gradient);
  DecoderLayer::Shared shared_with(const LayerContext& ctx, int64_t layer) const;

  DecoderSpec spec_;
  const SumPolicy& sums_;
  Options options_;
  ReplicaGroups replicas_;
  TensorRegion region_;
  ParameterTable table_;
  std::map<RopeSpec, ops::RopeTable> ropes_;
  std::unique_ptr<VocabEmbedding> embedding_;
  std::unique_ptr<PerLayerEmbedding> per_layer_;  // null if the model has none
  std::vector<DecoderLayer> layers_;
  std::unique_ptr<RmsNorm> final_norm_;
  std::unique_ptr<LmHead> head_;

  // Of the pass under way.
  std::vector<DecoderLayer::Saved> saved_;
  PerLayerEmbedding::Saved per_layer_saved_;
  std::map<int64_t, SharedKv> shared_kv_;  // by the layer that provides it
};

// The spec of the configured family.
DecoderSpec decoder_spec(const ModelConfig& config);

}  // namespace invar
