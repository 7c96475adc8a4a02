#pragma once

#include "layers/rms_norm.h"
#include "models/decoder_spec.h"

namespace invar {

// h + attention(norm(h)), then h + mlp(norm(h)), on local tokens.
class DecoderLayer {
 public:
  struct Saved {
    Tensor h;     // (local, C) input
    Tensor rstd;  // f32 (local)
    SelfAttention::Saved attention;
    Tensor h_mid;  // (local, C) after attention
    Tensor rstd_mid;
    GatedMlp::Saved mlp;
  };

  DecoderLayer(ParameterTable& table, ReplicaGroups& replicas, const LayerSpec& spec, const ops::RopeTable& rope,
               bool sequence_parallel);

  // h (local, C) -> h_out (local, C), written to h_out. Without h_out it only fills saved: recomputation.
  void forward(const LayerContext& ctx, const Tensor& h, const Tensor& h_out, Saved& saved) const;
  // d_h (local, C): the gradient of the layer's output on entry, of its input on return. Uses saved up.
  void backward(const LayerContext& ctx, Saved& saved, const Tensor& d_h) const;

 private:
  RmsNorm input_norm_;
  SelfAttention attention_;
  RmsNorm post_attention_norm_;
  GatedMlp mlp_;
};

}  // namespace invar
