#include "layers/layer_context.h"

#include "device/device.h"

namespace invar {

void offer(const LayerContext& ctx, const std::string& name, const Tensor& local, int64_t first_row) {
  if (ctx.sink == nullptr || !ctx.sink->wants(name)) return;
  if (local.device() != DeviceType::kCuda) return ctx.sink->record(name, local, first_row);
  std::vector<std::byte> bytes(static_cast<size_t>(local.bytes()));
  const Tensor host(bytes.data(), local.dtype(), DeviceType::kCpu, local.shape());
  copy_across(ctx.stream, local, host);
  ctx.sink->record(name, host, first_row);
}

}  // namespace invar
