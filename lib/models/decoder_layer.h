#pragma once

#include <optional>

#include "layers/rms_norm.h"
#include "models/decoder_spec.h"

namespace invar {

// On local tokens, parts in brackets where the spec names them:
//   h = h + [norm](attention(norm(h)))
//   h = h + [norm](mlp(norm(h)))
//   [h = h + norm(gate(h, per-layer input))]
//   [h = h · scalar]
class DecoderLayer {
 public:
  // What a branch of the residual stream keeps for the norm of its output.
  struct OutputNorm {
    Tensor x;     // (local, C) before the norm
    Tensor rstd;  // f32 (local)
  };
  struct Saved {
    Tensor h;     // (local, C) input
    Tensor rstd;  // f32 (local)
    SelfAttention::Saved attention;
    OutputNorm attention_output;
    Tensor h_mid;  // (local, C) after attention
    Tensor rstd_mid;
    GatedMlp::Saved mlp;
    OutputNorm mlp_output;
    Tensor h_late;  // (local, C) after the MLP, if there is a per-layer input
    PerLayerGate::Saved per_layer;
    OutputNorm per_layer_output;
  };
  // What a layer shares with others; none of it is the layer's to allocate.
  struct Shared {
    const SharedKv* kv = nullptr;  // if it borrows or provides keys and values
    Tensor input, d_input;         // (T, w) per-layer input of this layer, if the model has them
  };

  DecoderLayer(const LayerSetup& setup, const LayerSpec& spec, const ops::RopeTable& rope);

  // h (local, C) -> h_out (local, C), written to h_out. Without h_out it only fills saved: recomputation.
  void forward(const LayerContext& ctx, const Shared& shared, const Tensor& h, const Tensor& h_out, Saved& saved) const;
  // d_h (local, C): the gradient of the layer's output on entry, of its input on return. Uses saved up.
  void backward(const LayerContext& ctx, const Shared& shared, Saved& saved, const Tensor& d_h) const;

  std::string explain_attention(const LayerContext& ctx) const { return attention_.explain(ctx); }
  // Columns of a SharedKv that this layer provides.
  int64_t kv_width() const { return attention_.kv_width(); }

 private:
  void add_output(const LayerContext& ctx, const std::optional<RmsNorm>& norm, const Tensor& h, const Tensor& branch,
                  OutputNorm& saved, const Tensor& h_out) const;
  Tensor branch_gradient(const LayerContext& ctx, const std::optional<RmsNorm>& norm, const OutputNorm& saved,
                         const Tensor& d_h) const;
  static Tensor branch_input(const LayerContext& ctx, const RmsNorm& norm, const Tensor& h, const Tensor& rstd,
                             const Tensor& kept);
  void per_layer_forward(const LayerContext& ctx, const Shared& shared, const Tensor& h_out, Saved& saved) const;
  void per_layer_backward(const LayerContext& ctx, const Shared& shared, Saved& saved, const Tensor& d_h) const;

  RmsNorm input_norm_;
  SelfAttention attention_;
  std::optional<RmsNorm> attention_output_norm_;
  RmsNorm mlp_norm_;
  GatedMlp mlp_;
  std::optional<RmsNorm> mlp_output_norm_;
  std::optional<PerLayerGate> per_layer_;
  std::optional<RmsNorm> per_layer_output_norm_;
  std::optional<WeightId> scalar_;
};

}  // namespace invar
