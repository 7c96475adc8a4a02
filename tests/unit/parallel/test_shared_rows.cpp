// Replicas of unequal widths: which rows lie together where, who owns them, and that gradients and values find their
// way.
#include <array>
#include <deque>

#include "comm/thread_communicator.h"
#include "parallel/gradient_sync.h"
#include "parallel/shared_rows.h"
#include "parallel/unit_partition.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

constexpr int64_t kUnits = 13;

Weight weight(std::string name, int64_t rows, int64_t cols, std::vector<Parameter> parameters) {
  Weight w;
  w.name = std::move(name);
  w.rows = rows;
  w.cols = cols;
  w.parameters = std::move(parameters);
  return w;
}

// A norm that all ranks hold, a matrix fused of two by units, and one whose rows are held by two ranks each beyond
// kUnits / 2 ranks: the kinds that a model has.
void fill(ParameterTable& table, Communicator* tensor, Communicator* pair) {
  const Range units = split_units(kUnits, tensor->size())[static_cast<size_t>(tensor->rank())];
  Parameter norm;
  norm.name = "norm";
  norm.shape = {37};
  norm.runs = {{{0, 37}, 0}};
  norm.replicas = tensor;
  table.add(weight("norm", 37, 1, {norm}));
  norm.name = "norm 2";
  table.add(weight("norm 2", 37, 1, {norm}));

  Parameter gate, up;
  gate.name = "gate";
  up.name = "up";
  gate.shape = {3 * kUnits, 5};
  up.shape = {2 * kUnits, 5};
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t local = 5 * (unit - units.begin);
    gate.runs.push_back({{3 * unit, 3 * unit + 3}, local});
    up.runs.push_back({{2 * unit, 2 * unit + 2}, local + 3});
  }
  table.add(weight("fused", 5 * units.size(), 5, {gate, up}));

  Parameter shared;
  shared.name = "shared";
  shared.shape = {6, 7};
  shared.runs = {{{0, 6}, 0}};
  if (pair != nullptr) {  // ranks 0, 1 have the first rows, the others the second ones
    shared.runs = tensor->rank() < 2 ? std::vector<RowRun>{{{0, 3}, 0}} : std::vector<RowRun>{{{3, 6}, 0}};
    shared.replicas = pair;
  }
  const int64_t rows = shared.runs.front().global.size();
  table.add(weight("shared", rows, 7, {shared}));
}

// A replica of four ranks shares rows in pairs, one of one rank has them all.
Communicator* pair_of(Communicator* pair, int width) {
  return width == 4 ? pair : nullptr;
}

struct Layout {
  Topology topology;
  int64_t bucket;
};
std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const std::vector<int>& widths : std::vector<std::vector<int>>{{4, 1}, {1, 4}, {4, 1, 4}, {1, 1, 4}}) {
    for (const int64_t bucket : {1, 100, 1 << 20}) {
      all.push_back({{4, static_cast<int>(widths.size()), widths, {}}, bucket});
    }
  }
  return all;
}

// The layouts of all ranks, as a run without peers sees them.
struct Tables {
  explicit Tables(const Topology& topology) {
    for (int replica = 0; replica < topology.data; ++replica) {
      const int width = topology.width(replica);
      for (int rank = 0; rank < width; ++rank) {
        groups.push_back(make_recording_communicator(rank, width, "tensor", &ignored));
        Communicator* const tensor = groups.back().get();
        groups.push_back(make_recording_communicator(rank % 2, 2, "pair", &ignored));
        fill(tables.emplace_back(), tensor, pair_of(groups.back().get(), width));
        Arena values("values", DeviceType::kMeta, 0), gradients("gradients", DeviceType::kMeta, 0);
        tables.back().allocate(values, gradients, DType::kF32);
        all.push_back(&tables.back());
      }
    }
  }
  TrafficTable ignored;
  std::vector<std::unique_ptr<Communicator>> groups;
  std::deque<ParameterTable> tables;
  std::vector<const ParameterTable*> all;
};

// What every replica's gradient of a logical element is, times the replica + 1.
float term(const std::string& name, int64_t row, int64_t col) {
  return static_cast<float>(static_cast<int64_t>(name.size()) * 1000 + row * 16 + col);
}

void for_each_element(const ParameterTable& table,
                      const std::function<void(const Parameter&, int64_t row, int64_t col, size_t at)>& visit) {
  table.for_each_run([&](const Weight& w, const Parameter& parameter, const RowRun& run, Range elements) {
    for (int64_t i = 0; i < elements.size(); ++i) {
      visit(parameter, run.global.begin + i / w.cols, i % w.cols, static_cast<size_t>(elements.begin + i));
    }
  });
}

int64_t owned_elements(const RowOwnership& ownership) {
  int64_t owned = 0;
  for (const RowOwnership::Piece& piece : ownership.pieces()) owned += piece.elements.size();
  return owned;
}

// What a rank has to own of the rows that count on it: as much as its replica has ranks.
double share_of(const ParameterTable& table, const Topology& topology, int world_rank) {
  int64_t held = 0;
  table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
    if (parameter.counted()) held += elements.size();
  });
  const int width = topology.width(topology.replica_of(world_rank));
  return static_cast<double>(held * width) / topology.world();
}

// The rows of per-layer embeddings: of each layer a rank holds one or a few.
void fill_layers(ParameterTable& table, int width, int tensor_rank, int64_t cols) {
  constexpr int64_t kLayers = 42, kBlocks = 8;
  const Range held = split_units(kBlocks, width)[static_cast<size_t>(tensor_rank)];
  Parameter layers;
  layers.name = "layers";
  layers.shape = {kLayers * kBlocks, cols};
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const int64_t first = layer * kBlocks;
    layers.runs.push_back({{first + held.begin, first + held.end}, layer * held.size()});
  }
  table.add(weight("layers", kLayers * held.size(), cols, {layers}));
  Arena values("values", DeviceType::kMeta, 0), gradients("gradients", DeviceType::kMeta, 0);
  table.allocate(values, gradients, DType::kF32);
}

// Units of a weight that a replica of `healthy` ranks shares with one of `reduced`: for each pair of ranks that share
// some, in the order of the units.
struct SharedUnits {
  int64_t units;
  int healthy, reduced;
  std::vector<int64_t> of_pairs;
};

void check_shared_units(const SharedUnits& expected) {
  constexpr int64_t kCols = 3;
  const Topology topology{expected.healthy, 2, {expected.reduced, expected.healthy}, {}};
  std::deque<ParameterTable> tables;
  std::vector<const ParameterTable*> all;
  for (int rank = 0; rank < topology.world(); ++rank) {
    const int width = topology.width(topology.replica_of(rank));
    const Range rows = split_units(expected.units, width)[static_cast<size_t>(topology.tensor_rank(rank))];
    Parameter p;
    p.name = "w";
    p.shape = {expected.units, kCols};
    p.runs = {{rows, 0}};
    tables.emplace_back().add(weight("w", rows.size(), kCols, {p}));
    Arena values("values", DeviceType::kMeta, 0), gradients("gradients", DeviceType::kMeta, 0);
    tables.back().allocate(values, gradients, DType::kF32);
    all.push_back(&tables.back());
  }
  const std::vector<SharedBlock> blocks = shared_rows(topology, all, std::array<WeightId, 1>{0});
  std::vector<int64_t> of_pairs, of_rank(static_cast<size_t>(topology.world()));
  for (const SharedBlock& block : blocks) {
    of_pairs.push_back(block.elements / kCols);
    for (const SharedBlock::Place& holder : block.holders) {
      of_rank[static_cast<size_t>(holder.world_rank)] += block.elements / kCols;
    }
    CHECK(block.copies.empty());
  }
  CHECK(of_pairs == expected.of_pairs);
  std::vector<int64_t> margins(static_cast<size_t>(expected.reduced), expected.units / expected.reduced);
  margins.insert(margins.end(), static_cast<size_t>(expected.healthy), expected.units / expected.healthy);
  CHECK(of_rank == margins);
}

}  // namespace

// The sizes that Megatron-LM's map is known by. It moves units of the ranks beyond the reduced replica's to the others,
// one by one in turn; here all ranks keep a contiguous run, so neighbours share units, with the same margins.
TEST_CASE("units that replicas of two widths share") {
  check_shared_units({24, 8, 6, {3, 1, 2, 2, 1, 3, 3, 1, 2, 2, 1, 3}});
  check_shared_units({96, 8, 6, {12, 4, 8, 8, 4, 12, 12, 4, 8, 8, 4, 12}});
  check_shared_units({48, 8, 6, {6, 2, 4, 4, 2, 6, 6, 2, 4, 4, 2, 6}});
  check_shared_units({56, 8, 7, {7, 1, 6, 2, 5, 3, 4, 4, 3, 5, 2, 6, 1, 7}});
  check_shared_units({32, 4, 2, {8, 8, 8, 8}});
  check_shared_units({12, 4, 3, {3, 1, 2, 2, 1, 3}});
}

TEST_CASE("replicas of unequal widths: every row has one owner, in whole rows") {
  for (const Layout& layout : layouts()) {
    const Tables ranks(layout.topology);
    std::map<std::string, std::map<std::pair<int64_t, int64_t>, int>> owners;
    for (int rank = 0; rank < layout.topology.world(); ++rank) {
      const ParameterTable& table = *ranks.all[static_cast<size_t>(rank)];
      const RowOwnership ownership(layout.topology, ranks.all, rank, table, layout.bucket);
      std::vector<int> owned(static_cast<size_t>(table.flat_size()), 0);
      for (const RowOwnership::Piece& piece : ownership.pieces()) {
        const Weight& w = table.weight(piece.weight);
        CHECK(piece.bucket == ownership.bucket_of(piece.weight));
        CHECK((piece.elements.begin - w.offset) % w.cols == 0);
        CHECK(piece.elements.size() % w.cols == 0);
        for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) ++owned[static_cast<size_t>(i)];
      }
      for_each_element(table, [&](const Parameter& parameter, int64_t row, int64_t col, size_t at) {
        owners[parameter.name][{row, col}] += owned[at];
      });
      const double beyond = static_cast<double>(owned_elements(ownership)) - share_of(table, layout.topology, rank);
      CHECK(std::abs(beyond) < 3 * 7);  // three of the longest rows; padding is shared out too
    }
    for (const auto& [name, elements] : owners) {
      for (const auto& [element, count] : elements) CHECK(count == 1);
    }
    CHECK(owners.size() == 5);
  }
}

TEST_CASE("replicas of unequal widths: a rank owns its share to a row, however few rows lie together") {
  constexpr int64_t kCols = 640;
  for (const std::vector<int>& widths :
       std::vector<std::vector<int>>{{3, 4, 4}, {4, 4, 3}, {8, 1}, {5, 3, 2}, {7, 8}}) {
    const Topology topology{std::ranges::max(widths), static_cast<int>(widths.size()), widths, {}};
    std::deque<ParameterTable> tables;
    std::vector<const ParameterTable*> all;
    for (int rank = 0; rank < topology.world(); ++rank) {
      fill_layers(tables.emplace_back(), topology.width(topology.replica_of(rank)), topology.tensor_rank(rank), kCols);
      all.push_back(&tables.back());
    }
    for (int rank = 0; rank < topology.world(); ++rank) {
      const ParameterTable& table = *all[static_cast<size_t>(rank)];
      const auto owned = static_cast<double>(owned_elements(RowOwnership(topology, all, rank, table, 1)));
      const double share = share_of(table, topology, rank);
      INFO("rank " << rank << " of " << topology.describe(false) << " owns " << owned << " elements of " << share);
      CHECK(std::abs(owned - share) < kCols);
    }
  }
}

TEST_CASE("replicas of unequal widths: owners get the sums, and everybody their values") {
  for (const Layout& layout : layouts()) {
    const Tables ranks(layout.topology);
    run_thread_ranks(layout.topology.world(), [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, layout.topology);
      const std::unique_ptr<Communicator> pair = groups.tensor->split(groups.tensor->rank() / 2, 0, "pair");
      Arena values("values", DeviceType::kCpu, 1 << 16), gradients("gradients", DeviceType::kCpu, 1 << 16);
      ParameterTable table;
      fill(table, groups.tensor.get(), pair_of(pair.get(), groups.tensor->size()));
      table.allocate(values, gradients, DType::kF32);
      const RowOwnership ownership(layout.topology, ranks.all, world.rank(), table, layout.bucket);
      const Stream stream(DeviceType::kCpu);
      const std::unique_ptr<SumPolicy> sums = fast_sums();
      GradientSync sync(table, ownership, groups, stream, *sums, gradients);
      auto gradient = table.flat_gradients().span<float>();
      for_each_element(table, [&](const Parameter& parameter, int64_t row, int64_t col, size_t at) {
        gradient[at] = term(parameter.name, row, col) * static_cast<float>(groups.replica() + 1);
      });
      sync.finish();
      const int data = layout.topology.data;
      const auto sum = static_cast<float>(data * (data + 1) / 2);
      auto value = table.flat_values().span<float>();
      std::vector<bool> own(static_cast<size_t>(table.flat_size()));
      for (const RowOwnership::Piece& piece : ownership.pieces()) {
        for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) own[static_cast<size_t>(i)] = true;
      }
      int wrong = 0;
      for_each_element(table, [&](const Parameter& parameter, int64_t row, int64_t col, size_t at) {
        if (!own[at]) return;
        wrong += gradient[at] != sum * term(parameter.name, row, col) ? 1 : 0;
        value[at] = term(parameter.name, row, col) + 0.5f;
      });
      for (size_t b = 0; b < ownership.buckets().size(); ++b) sync.publish(b);
      sync.await_values();
      for_each_element(table, [&](const Parameter& parameter, int64_t row, int64_t col, size_t at) {
        wrong += value[at] != term(parameter.name, row, col) + 0.5f ? 1 : 0;
      });
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("a row that a replica does not hold is a fault") {
  const Topology topology{2, 2, {2, 1}, {}};
  TrafficTable ignored;
  std::deque<ParameterTable> tables;
  std::vector<const ParameterTable*> all;
  for (const Range rows : {Range{0, 3}, Range{4, 8}, Range{0, 8}}) {
    Parameter p;
    p.name = "w";
    p.shape = {8, 2};
    p.runs = {{rows, 0}};
    tables.emplace_back().add(weight("w", rows.size(), 2, {p}));
    Arena values("values", DeviceType::kMeta, 0), gradients("gradients", DeviceType::kMeta, 0);
    tables.back().allocate(values, gradients, DType::kF32);
    all.push_back(&tables.back());
  }
  CHECK_THROWS_AS(RowOwnership(topology, all, 0, *all.front(), 100), Error);
}
