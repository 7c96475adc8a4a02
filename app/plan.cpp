#include <algorithm>

#include "app/commands.h"
#include "app/console.h"
#include "app/plan_invariant.h"
#include "app/plan_replicas.h"
#include "app/plan_units.h"
#include "app/rank_device.h"
#include "app/training_ranks.h"
#include "config/resolved.h"
#include "config/units.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "data/document_end.h"
#include "models/model_flops.h"
#include "train/dry_run.h"

namespace invar::app {
namespace {

std::string grouped(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

// Planned for GPUs where there are some, or where the config asks for them: a login node has none.
DeviceType planned_device(const Config& config) {
  return config.device == DeviceChoice::kCuda ? DeviceType::kCuda : choose_device(config);
}

void print_summary(const Config& config, const Topology& grid) {
  const int64_t batch = global_batch_size(config, grid.world());
  const int64_t s = config.train.sequence_length;
  const int64_t micro_batch = config.train.micro_batch_size;
  const double flops = model_flops_per_step(decoder_spec(config.model), batch, s);
  const ParameterCounts counts = count_parameters(config);
  const std::string constants = counts.constant > 0 ? format(" and {} untrained", grouped(counts.constant)) : "";
  print_line(format("parameters        {}{}", grouped(counts.trained), constants));
  print_line(format("ranks             {} = {}", grid.world(), grid.describe(false)));
  print_line(format("tokens a step     {} = {} sequences of {}", grouped(batch * s), batch, s));
  print_line(format("micro-steps       {} of {} sequences a rank", grid.describe_micro_steps(batch, micro_batch),
                    micro_batch));
  print_line(format("tokens in all     {} in {} steps", grouped(batch * s * config.train.steps), config.train.steps));
  if (config.data.eod_id >= 0) print_line(format("documents end     with token {} (data.eod_id)", config.data.eod_id));
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

std::string part_of(const Config& config, int width, int tensor_rank) {
  const HeadPartition heads = held_heads(config, config.model.num_key_value_heads, width, tensor_rank);
  const Range ffn = held_units(config, ffn_blocks(config.model.intermediate_size), width, tensor_rank);
  const Range vocabulary = held_units(config, vocab_units(config.model.vocab_size), width, tensor_rank);
  const int64_t block_width = ffn_block_width(config.model.intermediate_size);
  std::string text =
      format("q {:>3}-{:<3} kv {:>3}-{:<3} ffn {:>6}-{:<6} vocab {:>7}-{:<7}", heads.query_heads.begin,
             heads.query_heads.end - 1, heads.kv_heads.begin, heads.kv_heads.end - 1, ffn.begin * block_width,
             ffn.end * block_width - 1, vocabulary.begin * kVocabUnit, vocabulary.end * kVocabUnit - 1);
  if (const int64_t full_kv = config.model.num_global_key_value_heads; full_kv > 0) {
    const Range kv = held_heads(config, full_kv, width, tensor_rank).kv_heads;
    text += format(" kv of full layers {:>3}-{:<3}", kv.begin, kv.end - 1);
  }
  if (const int64_t per_layer = config.model.hidden_size_per_layer_input; per_layer > 0) {
    const Range units = held_units(config, per_layer_blocks(per_layer), width, tensor_rank);
    const int64_t block = per_layer_block_width(per_layer);
    text += format(" per-layer {:>3}-{:<3}", units.begin * block, units.end * block - 1);
  }
  return text;
}

std::string memory_of(const Config& config, const Topology& grid) {
  if (!grid.uniform()) return "of the replica of each width that needs most";
  return config.numerics.reduction == Reduction::kFast
             ? "the same for every data rank but for rounding of the optimizer's rows"
             : "of the data rank with the most sums of samples";
}

// Data-parallel replicas of a width are alike, so the table shows one; the largest memory over the data ranks is within
// a row.
void print_ranks(const Config& config, const Topology& grid, const std::vector<int>& launched) {
  print_line("");
  const DeviceType device = planned_device(config);
  const bool gpus = device == DeviceType::kCuda;
  print_line(format("memory per rank on {}, MiB; {}", gpus ? "GPUs" : "CPUs (device=cuda plans for GPUs)",
                    memory_of(config, grid)));
  if (gpus) print_line(format("up to {} MiB more for workspaces and NCCL", kOutsideArenas >> 20));
  print_line(format("{:>4} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}  holds", "rank", "parameters", "gradients",
                    "optimizer", "activations", "scratch", "constants", "total"));
  int64_t proofs = 0;
  for (const int replica : shown_replicas(config, grid)) {
    const int width = grid.width(replica);
    for (int rank = 0; rank < width; ++rank) {
      const int world_rank = grid.first_rank(replica) + rank;
      const MemorySizes m = measure_memory(config, grid, world_rank, device);
      proofs = std::max(proofs, m.proofs);
      print_line(format("{:>4} {} {} {} {} {} {} {}  {}",
                        grid.uniform() ? rank : launched[static_cast<size_t>(world_rank)], mib(m.parameters),
                        mib(m.gradients), mib(m.optimizer), mib(m.saved), mib(m.scratch), mib(m.constants),
                        mib(m.total()), part_of(config, width, rank)));
    }
  }
  if (proofs > 0) {
    print_line(format("while products and attention are proved, in the first step, up to {} MiB more", proofs >> 20));
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

void print_traffic(const Config& config, const Topology& grid, int world_rank, const std::vector<int>& launched) {
  TrafficTable traffic;
  measure_memory(config, grid, world_rank, planned_device(config), &traffic);
  print_line("");
  print_line(format("sent by rank {}: tensor groups in one micro-step, data groups in one step",
                    launched[static_cast<size_t>(world_rank)]));
  for (const auto& [name, sent] : traffic) {
    if (sent.bytes > 0) print_line(format("  {:<28} {:>6} calls {} MiB", name, sent.calls, mib(sent.bytes)));
  }
}

void print_plan(const PlanArguments& arguments, std::span<const HostSlot> hosts) {
  Config given = load_config(arguments.config, arguments.overrides);
  validate(given, arguments.world, hosts);
  settle_eod_id(given);
  const ReplicaPlan plan = plan_replicas(given, arguments.world, hosts);
  Config config = given;
  config.train.global_batch_size = plan.batch();
  const Topology grid = topology_of(plan);
  const bool as_launched = plan.training_ranks() == arguments.world && is_whole_grid(given, plan);
  print_summary(config, grid);
  const std::vector<int> launched = plan.training_order();
  print_ranks(config, grid, launched);
  if (as_launched) {
    print_grid(grid);
  } else {
    print_replicas(given, plan, hosts);
    if (!is_whole_grid(given, plan)) print_cost(given, plan, planned_device(config));
  }
  if (config.numerics.reduction == Reduction::kInvariant) print_invariant(config, grid, planned_device(config));
  if (grid.uniform()) return print_traffic(config, grid, 0, launched);
  for (const int replica : shown_replicas(config, grid)) {
    print_traffic(config, grid, grid.first_rank(replica), launched);
  }
}

}  // namespace

int plan(const PlanArguments& arguments, MpiSession& session) {
  // Started as the job that it plans, it knows where the ranks are.
  std::vector<HostSlot> hosts;
  if (session.world().size() == arguments.world) hosts = gather_hosts(session);
  together(session.world(), [&] {
    if (session.world().rank() == 0) print_plan(arguments, hosts);
  });
  return 0;
}

}  // namespace invar::app
