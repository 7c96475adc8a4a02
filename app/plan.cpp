#include <algorithm>

#include "app/commands.h"
#include "app/console.h"
#include "app/plan_invariant.h"
#include "app/rank_device.h"
#include "config/resolved.h"
#include "config/units.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "models/model_flops.h"
#include "train/train_state.h"

namespace invar::app {
namespace {

std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string mib(int64_t bytes) {
  return format("{:>11.1f}", static_cast<double>(bytes) / (1 << 20));
}

// Planned for GPUs where there are some, or where the config asks for them: a login node has none.
DeviceType planned_device(const Config& config) {
  return config.device == DeviceChoice::kCuda ? DeviceType::kCuda : choose_device(config);
}

void print_summary(const Config& config, const Topology& grid) {
  const int64_t batch = global_batch_size(config, grid.world());
  const int64_t s = config.train.sequence_length;
  const double flops = model_flops_per_step(decoder_spec(config.model), batch, s);
  const ParameterCounts counts = count_parameters(config);
  const std::string constants = counts.constant > 0 ? format(" and {} untrained", grouped(counts.constant)) : "";
  print_line(format("parameters        {}{}", grouped(counts.trained), constants));
  print_line(format("ranks             {} = tensor {} x data {}", grid.world(), grid.tensor, grid.data));
  print_line(format("tokens a step     {} = {} sequences of {}", grouped(batch * s), batch, s));
  print_line(format("micro-steps       {} of {} sequences a rank", batch / (config.train.micro_batch_size * grid.data),
                    config.train.micro_batch_size));
  print_line(format("tokens in all     {} in {} steps", grouped(batch * s * config.train.steps), config.train.steps));
  if (!checkpoint_dir(config).empty()) {
    const int64_t bytes = 4 * (3 * counts.trained + counts.constant);  // fp32 masters and two moments
    const bool copied = config.checkpoint.async || planned_device(config) == DeviceType::kCuda;
    const std::string copy =
        copied ? format("; from the first save on a copy in host memory, {} MiB a rank", bytes / grid.world() >> 20)
               : "";
    print_line(format("checkpoint        {} MiB of fp32 masters and moments{}", bytes >> 20, copy));
  }
  print_line(format("model FLOPs       {:.3e} a step, {:.3e} a token", flops, flops / static_cast<double>(batch * s)));
}

// As UnitCut counts them.
int64_t leaves_of(const Config& config) {
  return config.numerics.reduction == Reduction::kFast ? 0 : config.numerics.leaves;
}

// Units that a tensor rank holds.
Range held_units(const Config& config, int64_t units, int tensor_rank) {
  return unit_runs(units, leaves_of(config), config.parallel.tensor)[static_cast<size_t>(tensor_rank)];
}

HeadPartition held_heads(const Config& config, int64_t kv_heads, int tensor_rank) {
  return partition_heads(config.model.num_attention_heads, kv_heads, leaves_of(config), config.parallel.tensor,
                         tensor_rank);
}

std::string part_of(const Config& config, int tensor_rank) {
  const HeadPartition heads = held_heads(config, config.model.num_key_value_heads, tensor_rank);
  const Range ffn = held_units(config, ffn_blocks(config.model.intermediate_size), tensor_rank);
  const Range vocabulary = held_units(config, vocab_units(config.model.vocab_size), tensor_rank);
  const int64_t width = ffn_block_width(config.model.intermediate_size);
  std::string text = format("q {:>3}-{:<3} kv {:>3}-{:<3} ffn {:>6}-{:<6} vocab {:>7}-{:<7}", heads.query_heads.begin,
                            heads.query_heads.end - 1, heads.kv_heads.begin, heads.kv_heads.end - 1, ffn.begin * width,
                            ffn.end * width - 1, vocabulary.begin * kVocabUnit, vocabulary.end * kVocabUnit - 1);
  if (const int64_t full_kv = config.model.num_global_key_value_heads; full_kv > 0) {
    const Range kv = held_heads(config, full_kv, tensor_rank).kv_heads;
    text += format(" kv of full layers {:>3}-{:<3}", kv.begin, kv.end - 1);
  }
  if (const int64_t per_layer = config.model.hidden_size_per_layer_input; per_layer > 0) {
    const Range units = held_units(config, per_layer_blocks(per_layer), tensor_rank);
    const int64_t block = per_layer_block_width(per_layer);
    text += format(" per-layer {:>3}-{:<3}", units.begin * block, units.end * block - 1);
  }
  return text;
}

// Data-parallel replicas are alike, so the table shows one; the largest memory over the data ranks is within a row.
void print_ranks(const Config& config, const Topology& grid) {
  print_line("");
  const bool gpus = planned_device(config) == DeviceType::kCuda;
  print_line(format("memory per rank on {}, MiB; {}", gpus ? "GPUs" : "CPUs (device=cuda plans for GPUs)",
                    config.numerics.reduction == Reduction::kFast
                        ? "the same for every data rank but for rounding of the optimizer's rows"
                        : "of the data rank with the most gradient buffers"));
  if (gpus) print_line(format("up to {} MiB more for the workspaces of cuDNN, cuBLAS and NCCL", kOutsideArenas >> 20));
  print_line(format("{:>4} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}  holds", "rank", "parameters", "gradients",
                    "optimizer", "activations", "scratch", "constants", "total"));
  const int first = grid.tensor * fullest_data_rank(config, grid);
  for (int rank = 0; rank < grid.tensor; ++rank) {
    const MemorySizes m = measure_memory(config, grid, rank + first, planned_device(config));
    print_line(format("{:>4} {} {} {} {} {} {} {}  {}", rank, mib(m.parameters), mib(m.gradients), mib(m.optimizer),
                      mib(m.saved), mib(m.scratch), mib(m.constants), mib(m.total()), part_of(config, rank)));
  }
}

void print_grid(const Topology& grid) {
  print_line("");
  print_line("world ranks by replica: tensor-parallel groups are rows");
  constexpr int kShown = 16;
  for (int data = 0; data < std::min(grid.data, kShown); ++data) {
    std::string row = format("data {:>4}:", data);
    for (int tensor = 0; tensor < grid.tensor; ++tensor) row += format(" {:>5}", data * grid.tensor + tensor);
    print_line(row);
  }
  if (grid.data > kShown) print_line(format("... and {} more replicas", grid.data - kShown));
}

void print_traffic(const Config& config, const Topology& grid) {
  TrafficTable traffic;
  measure_memory(config, grid, 0, planned_device(config), &traffic);
  print_line("");
  print_line("sent by rank 0: tensor groups in one micro-step, data groups in one step");
  for (const auto& [name, sent] : traffic) {
    if (sent.bytes > 0) print_line(format("  {:<28} {:>6} calls {} MiB", name, sent.calls, mib(sent.bytes)));
  }
}

void print_plan(const PlanArguments& arguments) {
  const Config config = load_config(arguments.config, arguments.overrides);
  validate(config, arguments.world);
  const Topology grid{config.parallel.tensor, data_degree(config, arguments.world)};
  print_summary(config, grid);
  print_ranks(config, grid);
  print_grid(grid);
  if (config.numerics.reduction == Reduction::kInvariant) print_invariant(config, grid, planned_device(config));
  print_traffic(config, grid);
}

}  // namespace

int plan(const PlanArguments& arguments, MpiSession& session) {
  together(session.world(), [&] {
    if (session.world().rank() == 0) print_plan(arguments);
  });
  return 0;
}

}  // namespace invar::app
