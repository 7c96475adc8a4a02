#include "train/rank_layouts.h"

namespace invar {

struct RankLayouts::Rank {
  Rank(const DecoderSpec& spec, int width, int tensor_rank, const DecoderModel::Options& options)
      : world(make_recording_communicator(tensor_rank, width, "world", &ignored)),
        groups(make_process_groups(*world, {width, 1}, GroupMaker(&ignored))),
        model(spec, groups, options) {
    Arena parameters("parameters", DeviceType::kMeta, 0);
    Arena gradients("gradients", DeviceType::kMeta, 0);
    Arena constants("constants", DeviceType::kMeta, 0);
    model.allocate(Stream::meta(DeviceType::kCpu), parameters, gradients, constants);
  }

  TrafficTable ignored;
  std::unique_ptr<Communicator> world;
  ProcessGroups groups;
  DecoderModel model;
};

RankLayouts::RankLayouts(const DecoderSpec& spec, const Topology& topology, const DecoderModel::Options& options) {
  for (int replica = 0; replica < topology.data; ++replica) {
    const int width = topology.width(replica);
    for (int tensor_rank = 0; tensor_rank < width; ++tensor_rank) {
      std::unique_ptr<Rank>& rank = ranks_[{width, tensor_rank}];
      if (rank == nullptr) rank = std::make_unique<Rank>(spec, width, tensor_rank, options);
      tables_.push_back(&rank->model.parameters());
    }
  }
}

RankLayouts::~RankLayouts() = default;

}  // namespace invar
