#include "train/dry_run.h"

#include "comm/recording_communicator.h"

namespace invar {
namespace {

// A rank without bytes and without peers: the real code runs on it and moves nothing.
struct MetaRank {
  MetaRank(const Config& config, const Topology& topology, int world_rank, TrafficTable* traffic,
           DeviceType target = DeviceType::kCpu)
      : world(make_recording_communicator(world_rank, topology.world(), "world", traffic)),
        groups(make_process_groups(*world, topology, GroupMaker(traffic))),
        stream(Stream::meta(target)),
        state(config, groups, stream, {}) {}

  std::unique_ptr<Communicator> world;
  ProcessGroups groups;
  Stream stream;
  TrainState state;
};

}  // namespace

MemorySizes measure_memory(const Config& config, const Topology& topology, int world_rank, DeviceType target,
                           TrafficTable* traffic) {
  TrafficTable ignored;
  MetaRank rank(config, topology, world_rank, traffic != nullptr ? traffic : &ignored, target);
  rank.state.dry_run();
  return rank.state.used();
}

ParameterCounts count_parameters(const Config& config) {
  Config alone = config;
  alone.parallel.tensor = 1;
  alone.numerics.reduction = Reduction::kFast;  // whose workers the batch of one rank might not have
  TrafficTable ignored;
  const MetaRank rank(alone, Topology{}, 0, &ignored);
  ParameterCounts counts;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      (parameter.trained ? counts.trained : counts.constant) += parameter.numel();
    }
  }
  return counts;
}

std::vector<StateTensor> checkpoint_tensors(const ModelConfig& model) {
  Config config;
  config.model = model;
  config.train.sequence_length = 1;  // built to name its parameters, not to run
  TrafficTable ignored;
  const MetaRank rank(config, Topology{}, 0, &ignored);
  std::vector<StateTensor> tensors;
  for (const Weight& weight : rank.state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      tensors.emplace_back("model", parameter);
      tensors.back().transposed = false;
    }
  }
  return tensors;
}

void check_hf_weights(const Config& config, const Topology& topology, int world_rank, const HfWeights& weights) {
  TrafficTable ignored;
  const MetaRank rank(config, topology, world_rank, &ignored);
  load_hf_weights(rank.state.parameters(), rank.stream, weights);
}

}  // namespace invar
