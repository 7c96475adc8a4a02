#include "parallel/gradient_sync.h"

#include <map>

#include "comm/thread_communicator.h"
#include "copied_tables.h"
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

// Of a rank's flat buffer: which logical element is where, and whether it is a copy that another rank owns.
struct Element {
  const Parameter* parameter = nullptr;  // null: padding
  int64_t row = 0;
  int64_t col = 0;
};
std::vector<Element> elements_of(const ParameterTable& table) {
  std::vector<Element> all(static_cast<size_t>(table.flat_size()));
  table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
    for (int64_t i = 0; i < elements.size(); ++i) {
      all[static_cast<size_t>(elements.begin + i)] = {&parameter, run.global.begin + i / weight.cols, i % weight.cols};
    }
  });
  return all;
}

// Of all buckets together, from one.
const SharedBlock& block_of(const RowOwnership& ownership, size_t number, size_t& bucket) {
  for (bucket = 0; number > ownership.buckets()[bucket].blocks.size(); ++bucket) {
    number -= ownership.buckets()[bucket].blocks.size();
  }
  return ownership.buckets()[bucket].blocks[number - 1];
}

void check_owned_rows(const ParameterTable& table, const RowOwnership& ownership) {
  const std::vector<Element> elements = elements_of(table);
  std::vector<int64_t> of_piece(ownership.pieces().size());
  size_t last_piece = 0;
  for (const OwnedRows& own : ownership.owned_rows()) {
    const int64_t cols = own.parameter->cols();
    CHECK(own.parameter->counted());
    REQUIRE(own.elements.size() == own.rows.size() * cols);
    CHECK_FALSE(own.rows.empty());
    int64_t wrong = 0;
    for (int64_t i = 0; i < own.elements.size(); ++i) {
      const auto& [parameter, row, col] = elements[static_cast<size_t>(own.elements.begin + i)];
      wrong += parameter != own.parameter || row != own.rows.begin + i / cols || col != i % cols ? 1 : 0;
    }
    CHECK(wrong == 0);
    REQUIRE(own.piece < of_piece.size());
    CHECK(own.piece >= last_piece);
    last_piece = own.piece;
    const RowOwnership::Piece& piece = ownership.pieces()[own.piece];
    CHECK(piece.weight == own.weight);
    CHECK(intersect(piece.elements, own.elements) == own.elements);
    of_piece[own.piece] += own.elements.size();
    size_t bucket = 0;
    const SharedBlock& block = block_of(ownership, own.block, bucket);
    CHECK(bucket == piece.bucket);
    const Range owned = block.owned(ownership.replica());
    const int64_t place = ownership.place(ownership.buckets()[bucket], block);
    CHECK(intersect({place + owned.begin, place + owned.end}, own.elements) == own.elements);
  }
  for (size_t i = 0; i < of_piece.size(); ++i) {  // pieces have nothing else but padding
    int64_t copies = 0, held = 0;
    const Range piece = ownership.pieces()[i].elements;
    for (int64_t at = piece.begin; at < piece.end; ++at) {
      const Parameter* const parameter = elements[static_cast<size_t>(at)].parameter;
      held += parameter != nullptr ? 1 : 0;
      copies += parameter != nullptr && !parameter->counted() ? 1 : 0;
    }
    CHECK(copies == 0);
    CHECK(held == of_piece[i]);
  }
}

}  // namespace

TEST_CASE("of every row of every parameter one rank of the world is the owner, also of copies") {
  for (const Topology& topology : test::copied_topologies()) {
    const test::CopiedTables ranks(topology);
    for (const int64_t bucket : {1, 100, 1 << 20}) {
      INFO(topology.describe(false) << ", buckets of " << bucket);
      std::map<std::string, std::vector<int>> owners;  // of each row
      int64_t copies = 0;
      for (int rank = 0; rank < topology.world(); ++rank) {
        const ParameterTable& table = *ranks.all[static_cast<size_t>(rank)];
        const RowOwnership ownership = test::ownership_of(topology, ranks, rank, table, bucket);
        check_owned_rows(table, ownership);
        for (const OwnedRows& own : ownership.owned_rows()) {
          std::vector<int>& rows = owners[own.parameter->name];
          rows.resize(static_cast<size_t>(own.parameter->rows()));
          for (int64_t row = own.rows.begin; row < own.rows.end; ++row) ++rows[static_cast<size_t>(row)];
        }
        table.for_each_run([&](const Weight&, const Parameter& parameter, const RowRun&, Range elements) {
          copies += parameter.counted() ? 0 : elements.size();
        });
      }
      CHECK(owners.size() == 7);
      for (const auto& [name, rows] : owners) {
        INFO(name);
        CHECK(std::ranges::all_of(rows, [](int count) { return count == 1; }));
      }
      CHECK((copies > 0) == (topology.tensor > 1));
    }
  }
}

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
    const std::unique_ptr<SumPolicy> sums = fast_sums();
    GradientSync sync(table, ownership, groups, stream, *sums, gradients);
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
    const std::unique_ptr<SumPolicy> sums = fast_sums();
    GradientSync sync(table, ownership, groups, stream, *sums, gradients);
    for (const int step : {1, 2}) {
      for (float& x : table.flat_gradients().span<float>()) x = static_cast<float>(step);
      const auto mine = [&](size_t bucket) {
        const Range own = ownership.summed(bucket).front();
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
    const std::unique_ptr<SumPolicy> sums = fast_sums();
    GradientSync(table, ownership, groups, stream, *sums, gradients).finish();
    CHECK(table.weight(ids[0]).gradient.span<float>()[4] == static_cast<float>(world.rank() + 1));
    CHECK(table.weight(ids[1]).gradient.span<float>()[0] == 3.0f);
    CHECK(table.weight(ids[2]).gradient.span<float>()[4] == 3.0f);
  });
}
