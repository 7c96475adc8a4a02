// Tensor-parallel ranks hold copies of the norms and, beyond the KV heads, of key and value rows, and cut their flat
// buffers at different places. A row has one owner, so that copies are equal to the bit whatever the order of sums.
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "awkward_models.h"
#include "mock_run.h"
#include "support/catch.h"
#include "support/mpi_world.h"
#include "support/wrapped_communicator.h"

using namespace invar;

namespace {

// Three KV heads: two ranks get two and one of them. Of four ranks, two hold the same one, with two and one of its
// query heads: its rows lie at different places in their buffers.
Topology layout_of(int world_size) {
  switch (world_size) {
    case 6:
      return {2, 3};
    case 8:
      return {4, 2};
    case 12:
      return {4, 3};
    default:
      throw Error(ErrorKind::kConfig, format("no layout for {} ranks", world_size));
  }
}

Config model_of(Precision precision, const Topology& layout) {
  Config config = test::awkward_model(precision);
  config.model.intermediate_size = 150;
  config.model.num_hidden_layers = 6;
  config.model.num_attention_heads = 9;
  config.model.head_dim = 32;
  config.parallel.tensor = layout.tensor;
  config.parallel.data = layout.data;
  config.parallel.sequence = true;
  return config;
}

// The data group of a library whose sums follow a ring: the terms of a rank's part start behind that rank.
class RingOrder final : public WrappedCommunicator {
 public:
  using WrappedCommunicator::WrappedCommunicator;

  void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp) override {
    const int64_t total = send.numel();
    std::vector<float> terms(static_cast<size_t>(size() * total));
    all_gather(stream, send, Tensor(terms.data(), DType::kF32, DeviceType::kCpu, {std::ssize(terms)}),
               equal_counts(size(), total));
    int64_t begin = 0;
    for (int r = 0; r < rank(); ++r) begin += counts[static_cast<size_t>(r)];
    for (int64_t i = 0; i < receive.numel(); ++i) {
      float sum = 0;
      for (int step = 1; step <= size(); ++step) {
        sum += terms[static_cast<size_t>((rank() + step) % size() * total + begin + i)];
      }
      receive.data<float>()[i] = sum;
    }
  }
};

// A tensor group in which new values of copies stay where they are.
class Mute final : public WrappedCommunicator {
 public:
  using WrappedCommunicator::WrappedCommunicator;
  void broadcast(const Stream&, const Tensor&, int) override {}
};

enum class Sums : uint8_t { kByRank, kRing };
enum class Broadcasts : bool { kNo, kYes };

// Bytes of `part` that are not the same on all ranks of `group`.
int64_t differing_bytes(Communicator& group, const Stream& stream, const Tensor& part) {
  std::vector<std::byte> memory(static_cast<size_t>(group.size() * part.bytes()));
  const Tensor all(memory.data(), part.dtype(), DeviceType::kCpu, {group.size() * part.numel()});
  group.all_gather(stream, part, all, equal_counts(group.size(), part.numel()));
  const auto* own = static_cast<const std::byte*>(part.raw());
  int64_t differing = 0;
  for (size_t i = 0; i < memory.size(); ++i) differing += memory[i] != own[i % static_cast<size_t>(part.bytes())];
  return differing;
}

struct Copies {
  std::map<std::string, int64_t> differing;  // bytes, by the kind of weight
  int64_t over_data = 0;                     // the same for this rank's whole buffer and its data-parallel group
  StepResult last;
};

std::string kind_of(const std::string& name) {
  for (const char* kind : {"k_proj", "v_proj", "norm"}) {
    if (name.find(kind) != std::string::npos) return kind;
  }
  return name;
}

Copies train(Precision precision, Sums sums, Broadcasts broadcasts = Broadcasts::kYes) {
  Communicator& world = mpi_session().world();
  const Topology layout = layout_of(world.size());
  const Config config = model_of(precision, layout);
  ProcessGroups groups = make_process_groups(world, layout);
  if (sums == Sums::kRing) groups.holders = std::make_unique<RingOrder>(std::move(groups.holders));
  if (broadcasts == Broadcasts::kNo) groups.tensor = std::make_unique<Mute>(std::move(groups.tensor));
  test::MockRun run(config, groups);
  Copies copies;
  for (int64_t step = 0; step < config.train.steps; ++step) copies.last = run.train(step);
  const Stream& stream = run.state.stream();
  const Tensor& flat = run.state.parameters().flat_values();
  run.state.parameters().for_each_run([&](const Weight&, const Parameter& p, const RowRun&, Range elements) {
    if (p.replicas == nullptr || p.replicas->size() == 1) return;
    copies.differing[kind_of(p.name)] += differing_bytes(*p.replicas, stream, flat.rows(elements.begin, elements.end));
  });
  copies.over_data = differing_bytes(*groups.holders, stream, flat);
  return copies;
}

}  // namespace

TEST_CASE("copies of a weight stay equal to the bit, whatever the order of sums over data ranks") {
  Communicator& world = mpi_session().world();
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (const Sums sums : {Sums::kByRank, Sums::kRing}) {
      const Copies copies = train(precision, sums);
      const bool holds_kv_copy = copies.differing.contains("k_proj");
      CHECK(copies.differing.contains("norm"));
      CHECK(copies.differing.contains("v_proj") == holds_kv_copy);
      CHECK(all_reduce_value(world, int64_t{holds_kv_copy}, ReduceOp::kSum) ==
            (layout_of(world.size()).tensor > 3 ? 2 * layout_of(world.size()).data : 0));
      for (const auto& [kind, bytes] : copies.differing) {
        INFO(kind << " on rank " << world.rank());
        CHECK(bytes == 0);
      }
      CHECK(copies.over_data == 0);
      CHECK(all_reduce_value(world, copies.last.grad_norm, ReduceOp::kMax) == copies.last.grad_norm);
    }
  }
}

TEST_CASE("control: copies differ where the owner's values do not reach them") {
  Copies copies = train(Precision::kF32, Sums::kByRank, Broadcasts::kNo);
  CHECK(all_reduce_value(mpi_session().world(), copies.differing["norm"], ReduceOp::kMax) > 0);
}
