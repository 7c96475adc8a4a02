#include "parallel/gradient_sync.h"

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

void add_matrix(ParameterTable& table, const std::string& name, int64_t rows, int64_t cols) {
  Parameter p;
  p.name = name;
  p.shape = {rows, cols};
  p.runs = {{{0, rows}, 0}};
  Weight w;
  w.name = name;
  w.rows = rows;
  w.cols = cols;
  w.parameters = {std::move(p)};
  table.add(std::move(w));
}

void fill_table(ParameterTable& table, Arena& values, Arena& gradients) {
  add_matrix(table, "a", 7, 9);
  add_matrix(table, "b", 30, 5);
  add_matrix(table, "c", 1, 200);
  add_matrix(table, "d", 64, 16);
  table.allocate(values, gradients, DType::kF32);
}

}  // namespace

TEST_CASE("every element has one owner, at any number of ranks and bucket size") {
  Arena values("values", DeviceType::kMeta, 0);
  Arena gradients("gradients", DeviceType::kMeta, 0);
  ParameterTable table;
  fill_table(table, values, gradients);
  for (const int64_t bucket : {int64_t{1}, int64_t{100}, int64_t{1000}, int64_t{1} << 30}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      std::vector<int> owners(static_cast<size_t>(table.flat_size()), 0);
      for (int rank = 0; rank < ranks; ++rank) {
        const RowOwnership ownership(table, ranks, rank, bucket);
        for (const auto& piece : ownership.pieces()) {
          const Weight& w = table.weight(piece.weight);
          CHECK((piece.elements.begin - w.offset) % w.cols == 0);  // whole rows
          CHECK((piece.elements.end - w.offset) % w.cols == 0);
          for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) ++owners[static_cast<size_t>(i)];
        }
      }
      for (const Weight& w : table.weights()) {
        for (int64_t i = w.elements().begin; i < w.elements().end; ++i) CHECK(owners[static_cast<size_t>(i)] == 1);
      }
      int64_t next = 0;
      const RowOwnership ownership(table, ranks, 0, bucket);
      for (const auto& b : ownership.buckets()) {
        CHECK(b.elements.begin == next);
        next = b.elements.end;
        int64_t sum = 0;
        for (const int64_t count : b.blocks.front().counts) sum += count;
        CHECK(sum == b.elements.size());
      }
      CHECK(next == table.flat_size());
    }
  }
}

TEST_CASE("ranks of a tensor group cut buckets after the same weights, however unequal their shards") {
  std::vector<std::vector<size_t>> cuts;
  for (const Range rows : {Range{0, 70}, Range{70, 90}, Range{90, 90}}) {
    Arena values("values", DeviceType::kMeta, 0);
    Arena gradients("gradients", DeviceType::kMeta, 0);
    ParameterTable table;
    for (const bool sharded : {true, false, true, true, false, true}) {
      Weight w;
      w.rows = sharded ? rows.size() : 40;
      w.cols = 8;
      Parameter p;
      p.shape = {sharded ? 90 : 40, 8};
      p.runs = {{{sharded ? rows.begin : 0, sharded ? rows.end : 40}, 0}};
      w.parameters = {std::move(p)};
      table.add(std::move(w));
    }
    table.allocate(values, gradients, DType::kF32);
    const RowOwnership ownership(table, 2, 0, 1000);
    CHECK(ownership.buckets().back().elements.end == table.flat_size());
    cuts.emplace_back();
    for (WeightId id = 0; id < 6; ++id) cuts.back().push_back(ownership.bucket_of(id));
  }
  CHECK(cuts[0] == std::vector<size_t>{0, 0, 1, 1, 2, 2});
  CHECK(cuts[1] == cuts[0]);
  CHECK(cuts[2] == cuts[0]);
}

TEST_CASE("pieces are nearly equal where rows are small") {
  Arena values("values", DeviceType::kMeta, 0);
  Arena gradients("gradients", DeviceType::kMeta, 0);
  ParameterTable table;
  add_matrix(table, "w", 1000, 8);
  table.allocate(values, gradients, DType::kF32);
  const RowOwnership ownership(table, 7, 0, 1 << 20);
  for (const int64_t count : ownership.buckets().front().blocks.front().counts)
    CHECK(std::abs(count - 8000 / 7) <= 8 + 64);
}

TEST_CASE("finish sums over data ranks, publish hands the owners' values to all") {
  run_thread_ranks(3, [](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {1, 3});
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
    ParameterTable table;
    fill_table(table, values, gradients);
    const RowOwnership ownership(table, 3, world.rank(), 500);
    const Stream stream(DeviceType::kCpu);
    GradientSync sync(table, ownership, groups, stream, nullptr, gradients);
    auto gradient = table.flat_gradients().span<float>();
    for (size_t i = 0; i < gradient.size(); ++i)
      gradient[i] = static_cast<float>(i) * static_cast<float>(world.rank() + 1);
    sync.finish();
    auto value = table.flat_values().span<float>();
    for (const auto& piece : ownership.pieces()) {
      for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) {
        CHECK(gradient[static_cast<size_t>(i)] == static_cast<float>(i) * 6);
        value[static_cast<size_t>(i)] = static_cast<float>(i) + 0.5f;
      }
    }
    for (size_t b = 0; b < ownership.buckets().size(); ++b) sync.publish(b);
    sync.await_values();
    for (const Weight& w : table.weights()) {
      for (int64_t i = w.elements().begin; i < w.elements().end; ++i) {
        CHECK(value[static_cast<size_t>(i)] == static_cast<float>(i) + 0.5f);
      }
    }
  });
}

TEST_CASE("a bucket is summed when the last user of its weights is done, and once") {
  run_thread_ranks(2, [](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {1, 2});
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
    ParameterTable table;
    add_matrix(table, "a", 8, 8);
    add_matrix(table, "b", 8, 8);
    table.add_user(0);
    table.allocate(values, gradients, DType::kF32);
    const RowOwnership ownership(table, 2, world.rank(), 64);
    REQUIRE(ownership.buckets().size() == 2);
    const Stream stream(DeviceType::kCpu);
    GradientSync sync(table, ownership, groups, stream, nullptr, gradients);
    for (const int step : {1, 2}) {
      for (float& x : table.flat_gradients().span<float>()) x = static_cast<float>(step);
      const auto mine = [&](size_t bucket) {
        const Range own = ownership.owned(bucket).front();
        return table.flat_gradients().span<float>()[static_cast<size_t>(own.begin)];
      };
      sync.gradient_done(1);  // of an earlier micro-batch
      sync.begin_last_micro_batch();
      sync.gradient_done(0);
      CHECK(mine(0) == static_cast<float>(step));
      sync.gradient_done(1);
      CHECK(mine(1) == static_cast<float>(2 * step));
      sync.gradient_done(0);
      CHECK(mine(0) == static_cast<float>(2 * step));
      CHECK_THROWS_AS(sync.gradient_done(0), Error);
      sync.finish();
      CHECK(mine(0) == static_cast<float>(2 * step));
      CHECK(mine(1) == static_cast<float>(2 * step));
    }
  });
}

TEST_CASE("partial gradients are summed over their replicas, complete ones are not") {
  run_thread_ranks(2, [](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {2, 1});
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
    ParameterTable table;
    std::vector<WeightId> ids;
    for (const bool partial : {false, true, true}) {
      Parameter p;
      p.name = "norm";
      p.shape = {5};
      p.runs = {{{0, 5}, 0}};
      p.replicas = groups.tensor.get();
      p.partial_gradient = partial;
      Weight w;
      w.name = "norm";
      w.rows = 5;
      w.cols = 1;
      w.parameters = {std::move(p)};
      ids.push_back(table.add(std::move(w)));
    }
    table.allocate(values, gradients, DType::kF32);
    const RowOwnership ownership(table, 1, 0, 1 << 20);
    for (float& x : table.flat_gradients().span<float>()) x = static_cast<float>(world.rank() + 1);
    const Stream stream(DeviceType::kCpu);
    GradientSync(table, ownership, groups, stream, nullptr, gradients).finish();
    CHECK(table.weight(ids[0]).gradient.span<float>()[4] == static_cast<float>(world.rank() + 1));
    CHECK(table.weight(ids[1]).gradient.span<float>()[0] == 3.0f);
    CHECK(table.weight(ids[2]).gradient.span<float>()[4] == 3.0f);
  });
}
