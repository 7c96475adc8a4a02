#include "train/rank_layouts.h"

namespace invar {

struct RankLayouts::Rank {
  Rank(const DecoderSpec& spec, int width, int tensor_rank, const SumPolicy& sums, const DecoderModel::Options& options)
      : world(make_recording_communicator(tensor_rank, width, "world", &ignored)),
        groups(make_process_groups(*world, {width, 1}, GroupMaker(&ignored))),
        model(spec, groups, sums, options, {stream, memory, memory, memory}) {}

  TrafficTable ignored;
  std::unique_ptr<Communicator> world;
  ProcessGroups groups;
  Stream stream = Stream::meta(DeviceType::kCpu);
  Arena memory{"layout", DeviceType::kMeta, 0};
  DecoderModel model;
};

RankLayouts::RankLayouts(const DecoderSpec& spec, const Topology& topology, const SumPolicy& sums,
                         const DecoderModel::Options& options) {
  for (int replica = 0; replica < topology.replicas(); ++replica) {
    const int width = topology.width(replica);
    for (int tensor_rank = 0; tensor_rank < width; ++tensor_rank) {
      std::unique_ptr<Rank>& rank = ranks_[{width, tensor_rank}];
      if (rank == nullptr) rank = std::make_unique<Rank>(spec, width, tensor_rank, sums, options);
      tables_.push_back(&rank->model.parameters());
    }
  }
}

RankLayouts::~RankLayouts() = default;

}  // namespace invar
