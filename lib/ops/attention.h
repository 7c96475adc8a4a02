#pragma once

#include <string>

#include "device/stream.h"
#include "ops/head_view.h"
#include "ops/numerics.h"

namespace invar::ops {

struct AttentionParams {
  int64_t sequence_length = 0;  // T = samples · sequence_length; attention never crosses a sample
  float scale = 1.0f;
  int64_t window = 0;  // keys visible to a query, itself included; 0: all earlier ones
  // i32 (T): the first token of the query's document, counted from the start of its sample; earlier keys are hidden.
  // Within a sample it does not fall and is at most the query's own position. Undefined: a sample is one document.
  Tensor document_starts{};
  // In invariant numerics plans of cuDNN are proved; invar's own backends have one order and need no proof.
  Numerics numerics{};
};

// One way to compute causal grouped-query attention: query head h of a group sees its group's k and v. Groups of k and
// v with a group_stride of 0 are all the same ones. Scores and probabilities live in tiles; an S×S matrix is never
// stored. fp32 inside, whatever the dtype.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual std::string name() const = 0;
  // Empty if this backend can do it, else the reason, for a person.
  virtual std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const = 0;
  // out has q's shape and layout kind (any strides); lse: f32 (T, Hq), log of the sum of exp(scaled scores).
  virtual void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                       const HeadView& v, const HeadView& out, const Tensor& lse) const = 0;
  // Writes d_q, d_k, d_v (every element of them). delta: f32 (T, Hq) scratch. The sums have a fixed order that
  // does not depend on threads, samples or other heads.
  virtual void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                        const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out,
                        const Tensor& delta, const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const = 0;
};

// The first backend of the device's list that takes these parameters. Throws Error{kConfig} listing every refusal.
const AttentionBackend& choose_attention(DeviceType device, const AttentionParams& params, const HeadView& q,
                                         const HeadView& k);

// Its name, and in brackets why those before it in the list do not serve: "tiled (cudnn: the window is ...)".
std::string explain_attention(DeviceType device, const AttentionParams& params, const HeadView& q, const HeadView& k);

// "9.19.0" of the cuDNN that GPUs take attention from; empty if this build has none.
std::string cudnn_version();

// Plain loops in fp64 over whole rows: the oracle of the tests.
const AttentionBackend& reference_attention();

}  // namespace invar::ops
