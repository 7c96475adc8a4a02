#include "train/run_contract.h"

#include <bit>

#include "core/philox.h"

namespace invar {

std::optional<NumericsContract> run_contract(const Config& config, DeviceType device, int gpu) {
  if (config.numerics.reduction == Reduction::kFast) return std::nullopt;
  const std::string architecture = device == DeviceType::kCuda ? cuda_architecture(gpu) : "";
  return numerics_contract(config, arithmetic_of(config.numerics.precision, architecture));
}

std::optional<NumericsContract> run_contract(const Config& config, const Stream& stream) {
  const bool on_gpu = stream.device() == DeviceType::kCuda;
  return run_contract(config, stream.device(), on_gpu ? current_cuda_device() : 0);
}

void agree_on_contract(const std::optional<NumericsContract>& contract, Communicator& world) {
  if (!contract) return;
  const auto mine = std::bit_cast<int64_t>(hash_name(contract->text()));
  const int64_t least = all_reduce_value(world, mine, ReduceOp::kMin);
  const int64_t most = all_reduce_value(world, mine, ReduceOp::kMax);
  if (least == most) return;
  throw Error(
      ErrorKind::kConfig,
      format("the ranks' numerics contracts differ; the matrix products of this one are {}", contract->arithmetic),
      "numerics.reduction: invariant needs GPUs of one architecture");
}

}  // namespace invar
