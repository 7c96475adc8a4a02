#include "train/run_contract.h"

#include <algorithm>
#include <bit>

#include "core/philox.h"
#include "models/decoder_model.h"
#include "ops/attention_check.h"

namespace invar {

std::optional<NumericsContract> run_contract(const Config& config, DeviceType device, int gpu) {
  if (config.numerics.reduction == Reduction::kFast) return std::nullopt;
  const Precision precision = config.numerics.precision;
  if (device != DeviceType::kCuda) return numerics_contract(config, arithmetic_of(precision, ""));
  return numerics_contract(config, arithmetic_of(precision, cuda_architecture(gpu)),
                           attention_of(config, ops::cudnn_version()));
}

std::optional<NumericsContract> run_contract(const Config& config, const Stream& stream) {
  const bool on_gpu = stream.device() == DeviceType::kCuda;
  return run_contract(config, stream.device(), on_gpu ? current_cuda_device() : 0);
}

std::string attention_of(const Config& config, const std::string& cudnn) {
  const int64_t length = config.train.sequence_length;
  const DType dtype = config.numerics.precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
  const auto may_take_it = [&](const LayerSpec& layer) {
    const AttentionSpec& spec = layer.attention;
    ops::AttentionParams params{length, static_cast<float>(spec.scale), spec.window};
    if (config.data.reset_at_eod) params.document_starts = Tensor(nullptr, DType::kI32, DeviceType::kMeta, {length});
    const Tensor rows(nullptr, dtype, DeviceType::kMeta, {length, spec.head_dim});
    const ops::HeadView head{rows, 1, 1, spec.head_dim, spec.head_dim};
    return ops::cudnn_attention_refusal(params, head, head).empty();
  };
  const bool takes_it = !cudnn.empty() && std::ranges::any_of(decoder_spec(config.model).layers, may_take_it);
  return takes_it ? "cudnn-" + cudnn : "own";
}

void agree_on_contract(const std::optional<NumericsContract>& contract, Communicator& world) {
  if (!contract) return;
  const auto mine = std::bit_cast<int64_t>(hash_name(contract->text()));
  const int64_t least = all_reduce_value(world, mine, ReduceOp::kMin);
  const int64_t most = all_reduce_value(world, mine, ReduceOp::kMax);
  if (least == most) return;
  throw Error(ErrorKind::kConfig,
              format("the ranks' numerics contracts differ; the matrix products of this one are {}, its attention {}",
                     contract->arithmetic, contract->attention.empty() ? "own" : contract->attention),
              "numerics.reduction: invariant needs GPUs of one architecture and one version of cuDNN");
}

}  // namespace invar
