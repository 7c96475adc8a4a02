#include "parallel/logical_tensor.h"

#include "comm/thread_communicator.h"
#include "parallel/topology.h"
#include "parallel/unit_partition.h"
#include "support/errors.h"
#include "support/rank_checks.h"

using namespace invar;

TEST_CASE("a cut tensor is put together again on rank 0, plain and transposed, in f32 and bf16") {
  for (const int ranks : {1, 2, 3, 5}) {
    for (const bool transposed : {false, true}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        run_thread_ranks(ranks, [&](Communicator& world) {
          const Stream stream(DeviceType::kCpu);
          Arena values("values", DeviceType::kCpu, 1 << 16);
          Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
          const Range mine = split_units(10, ranks)[static_cast<size_t>(world.rank())];
          Parameter p;
          p.name = "w";
          p.shape = transposed ? std::vector<int64_t>{4, 10} : std::vector<int64_t>{10, 4};
          p.transposed = transposed;
          // Two runs, stored in swapped order with a gap.
          const int64_t half = mine.size() / 2;
          p.runs = {{{mine.begin, mine.begin + half}, mine.size() - half + 1}, {{mine.begin + half, mine.end}, 0}};
          Weight w;
          w.name = "w";
          w.rows = mine.size() + 1;
          w.cols = 4;
          w.parameters = {p};
          ParameterTable table;
          table.add(w);
          table.allocate(values, gradients, dtype);
          initialise(table, stream, 3, 1.0);
          const Weight& stored = table.weight(0);
          const auto logical = collect_logical(world, stream, table.flat_values(), stored, stored.parameters[0]);
          CHECK(std::ssize(logical) == (world.rank() == 0 ? 40 : 0));

          // The same tensor uncut.
          Arena whole_values("values", DeviceType::kCpu, 1 << 16);
          Arena whole_gradients("gradients", DeviceType::kCpu, 1 << 16);
          Parameter q = p;
          q.transposed = false;
          q.runs = {{{0, q.shape[0]}, 0}};
          Weight v = w;
          v.rows = q.shape[0];
          v.cols = q.shape[1];
          v.parameters = {q};
          ParameterTable whole;
          whole.add(v);
          whole.allocate(whole_values, whole_gradients, dtype);
          initialise(whole, stream, 3, 1.0);
          if (world.rank() == 0) CHECK(logical == read_f32(Stream(DeviceType::kCpu), whole.flat_values(), {0, 40}));
        });
      }
    }
  }
}

TEST_CASE("of several copies one is collected") {
  run_thread_ranks(3, [](Communicator& world) {
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
    Parameter p;
    p.name = "norm";
    p.shape = {6};
    p.runs = {{{0, 6}, 0}};
    p.replicas = &world;
    Weight w;
    w.name = "norm";
    w.rows = 6;
    w.cols = 1;
    w.parameters = {p};
    ParameterTable table;
    table.add(w);
    table.allocate(values, gradients, DType::kF32);
    for (float& x : table.flat_values().span<float>()) x = static_cast<float>(world.rank() + 1);
    const auto logical = collect_logical(world, Stream(DeviceType::kCpu), table.flat_values(), table.weight(0), p);
    if (world.rank() == 0) CHECK(logical == std::vector<float>(6, 1.0f));
  });
}

TEST_CASE("rows that no rank gives are missed") {
  run_thread_ranks(2, [](Communicator& world) {
    Parameter p;
    p.name = "w";
    p.shape = {6, 2};
    const Range mine = world.rank() == 0 ? Range{0, 3} : Range{4, 6};
    const std::vector<float> values(static_cast<size_t>(mine.size() * 2));
    const std::optional<Error> error = test::error_of([&] {
      collect_runs(world, Stream(DeviceType::kCpu), p, {{mine, 0}}, values);
    });
    if (world.rank() == 0) CHECK((error && test::contains(error->what(), "5 rows of 6")));
  });
}
