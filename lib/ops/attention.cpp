#include "ops/attention.h"

#include <span>

#include "ops/attention_check.h"
#include "ops/cpu/tiled_attention.h"

namespace invar::ops {
namespace {

// Checks what a device would be given, and does nothing.
class MetaAttention : public AttentionBackend {
 public:
  std::string name() const override { return "meta"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    return common_attention_refusal(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
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
      break;
  }
  return {};
}

}  // namespace

const AttentionBackend& choose_attention(DeviceType device, const AttentionParams& params, const HeadView& q,
                                         const HeadView& k) {
  const auto backends = backends_of(device);
  std::string refusals;
  for (const AttentionBackend* backend : backends) {
    const std::string refusal = backend->refusal(params, q, k);
    if (refusal.empty()) return *backend;
    refusals += format("; {}: {}", backend->name(), refusal);
  }
  if (backends.empty()) refusals = "; this build has none for the device";
  throw Error(
      ErrorKind::kConfig,
      format("no attention on {} for {} query heads on {} key heads, head_dim {}, {}, sequence length {}, window {}{}",
             name_of(device), q.heads(), k.heads(), q.head_dim, name_of(q.buffer.dtype()), params.sequence_length,
             params.window, refusals));
}

}  // namespace invar::ops
