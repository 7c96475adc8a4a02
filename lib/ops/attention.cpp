#include "ops/attention.h"

#include <span>

#include "ops/attention_check.h"
#include "ops/cpu/tiled_attention.h"
#include "ops/cuda/operations.h"
#include "ops/proofs.h"

namespace invar::ops {
namespace {

void note_proof(const AttentionParams& params, const HeadView& q, const HeadView& k,
                std::initializer_list<HeadView> read) {
  if (!cudnn_attention_refusal(params, q, k).empty()) return;
  params.numerics.note_proof(attention_proof_bytes(params, q, read));
}

// Checks what a device would be given, notes what a proof would take on a GPU, and does nothing.
class MetaAttention : public AttentionBackend {
 public:
  std::string name() const override { return "meta"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    return common_attention_refusal(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
    note_proof(params, q, k, {q, k, v});
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    note_proof(params, q, k, {q, k, v, out, d_out});
  }
};

// The backends of a device, best first.
std::span<const AttentionBackend* const> backends_of(DeviceType device) {
  static const MetaAttention meta;
  static const AttentionBackend* const cpu_list[] = {&cpu::tiled_attention()};
  static const AttentionBackend* const meta_list[] = {&meta};
  switch (device) {
    case DeviceType::kCpu:
      return cpu_list;
    case DeviceType::kMeta:
      return meta_list;
    case DeviceType::kCuda:
      return cuda::attention_backends();
  }
  return {};
}

// The first backend that takes the call, or null, and what those before it say.
struct Choice {
  const AttentionBackend* backend = nullptr;
  std::string refusals;  // "cudnn: ...; tiled: ..."
};

Choice choose(DeviceType device, const AttentionParams& params, const HeadView& q, const HeadView& k) {
  Choice choice;
  for (const AttentionBackend* backend : backends_of(device)) {
    const std::string refusal = backend->refusal(params, q, k);
    if (refusal.empty()) {
      choice.backend = backend;
      return choice;
    }
    choice.refusals += format("{}{}: {}", choice.refusals.empty() ? "" : "; ", backend->name(), refusal);
  }
  if (choice.refusals.empty()) choice.refusals = "this build has none for the device";
  return choice;
}

}  // namespace

std::string explain_attention(DeviceType device, const AttentionParams& params, const HeadView& q, const HeadView& k) {
  const Choice choice = choose(device, params, q, k);
  if (choice.backend == nullptr) return format("none ({})", choice.refusals);
  const std::string name = choice.backend->name();
  return choice.refusals.empty() ? name : format("{} ({})", name, choice.refusals);
}

const AttentionBackend& choose_attention(DeviceType device, const AttentionParams& params, const HeadView& q,
                                         const HeadView& k) {
  const Choice choice = choose(device, params, q, k);
  if (choice.backend != nullptr) return *choice.backend;
  throw Error(
      ErrorKind::kConfig,
      format(
          "no attention on {} for {} query heads on {} key heads, head_dim {}, {}, sequence length {}, window {}; {}",
          name_of(device), q.heads(), k.heads(), q.head_dim, name_of(q.buffer.dtype()), params.sequence_length,
          params.window, choice.refusals));
}

std::string cudnn_version() {
  return cuda::cudnn_version();
}

}  // namespace invar::ops
