// GradientSync in invariant numerics, and copies; test_row_ownership.cpp has the rest.
#include "parallel/gradient_sync.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <tuple>

#include "comm/thread_communicator.h"
#include "copied_tables.h"
#include "ordered_table.h"
#include "support/rank_checks.h"

using namespace invar;
using test::Elements;
using test::Gradients;

namespace {

constexpr int64_t kBatch = 12, kSequence = 20;

struct Cut {
  int data = 1;
  int64_t bucket = 1;
  bool overlapped = false;  // buckets are summed as their gradients are done
};

NumericsContract contract() {
  NumericsContract contract;
  contract.leaves = 8;
  contract.token_block = 1;
  return contract;
}

// Each weight's gradient after a step, from the ranks that own its rows. workers = 0: fast numerics.
std::map<std::string, Elements> summed(const Cut& cut, int64_t workers) {
  std::map<std::string, Elements> sums;
  run_thread_ranks(cut.data, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {1, cut.data});
    const Stream stream(DeviceType::kCpu);
    const int64_t samples = kBatch / cut.data;
    const std::unique_ptr<SumPolicy> policy =
        workers > 0
            ? invariant_sums(contract(), test::equal_order(workers, kBatch, cut.data, world.rank(), samples), stream)
            : fast_sums();
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 18);
    ParameterTable table;
    std::vector<WeightUse> uses;
    for (const auto& [name, rows, cols] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
             {"a", 7, 9}, {"b", 30, 5}, {"c", 1, 200}, {"d", 64, 16}}) {
      uses.push_back(test::add_matrix(table, name, rows, cols));
    }
    const WeightUse second = table.add_user(uses[1].id);
    table.allocate(values, gradients, DType::kF32, policy->gradient_layout());
    const RowOwnership ownership(table, cut.data, world.rank(), cut.bucket);
    GradientSync sync(table, ownership, groups, stream, *policy, gradients);
    const std::unique_ptr<GradientSink> sink = policy->gradients(table, sync);
    TensorRegion region(*groups.tensor, false, policy->token_block());
    region.set_tokens(samples * kSequence);
    const SumContext ctx{stream, region, gradients, DType::kF32, kSequence};
    sink->begin_micro_batch(ctx, 0);
    if (cut.overlapped) sync.begin_last_micro_batch();
    const int64_t first = region.tokens() * world.rank();
    const auto add = [&](const WeightUse& use) {
      Gradients all(table, use, kBatch * kSequence);
      sink->add_lookups(ctx, use, [&](Range tokens, const ops::SampleSums& into) {
        all.add({first + tokens.begin, first + tokens.end}, into);
      });
      sink->done(use.id);
    };
    for (size_t i = uses.size(); i-- > 0;) add(uses[i]);
    add(second);
    sink->end_micro_batch(ctx);
    sync.finish();
    for (int rank = 0; rank < cut.data; ++rank) {  // in turn, the owned pieces in order
      world.barrier();
      if (rank != world.rank()) continue;
      for (const RowOwnership::Piece& piece : ownership.pieces()) {
        const auto own = table.flat_gradients().rows(piece.elements.begin, piece.elements.end).span<float>();
        Elements& all = sums[table.weight(piece.weight).name];
        all.insert(all.end(), own.begin(), own.end());
      }
    }
    world.barrier();
  });
  return sums;
}

// The definition, of the weights above.
std::map<std::string, Elements> expected_sums(int64_t workers) {
  Arena values("values", DeviceType::kMeta, 0);
  Arena gradients("gradients", DeviceType::kMeta, 0);
  ParameterTable table;
  test::add_matrix(table, "a", 7, 9);
  test::add_matrix(table, "b", 30, 5);
  test::add_matrix(table, "c", 1, 200);
  test::add_matrix(table, "d", 64, 16);
  const WeightUse second = table.add_user(1);
  table.allocate(values, gradients, DType::kF32);
  std::map<std::string, Elements> sums;
  for (WeightId id = 0; id < 4; ++id) {
    const Gradients first(table, id, kBatch * kSequence);
    sums[table.weight(id).name] = test::tree_root(first.worker_sums(workers), first.elements);
  }
  const Gradients other(table, second, kBatch * kSequence);
  const Elements term = test::tree_root(other.worker_sums(workers), other.elements);
  std::ranges::transform(sums["b"], term, sums["b"].begin(), std::plus());
  return sums;
}

int64_t different(const std::map<std::string, Elements>& a, const std::map<std::string, Elements>& b) {
  int64_t count = 0;
  for (const auto& [name, values] : a) {
    if (values.size() != b.at(name).size()) throw std::logic_error("'" + name + "' is not whole");
    count += test::different(values, b.at(name));
  }
  return count;
}

}  // namespace

TEST_CASE("in invariant numerics any number of data ranks gives the bits of the definition, at any bucket size") {
  for (const int64_t workers : {4, 12}) {
    const std::map<std::string, Elements> expected = expected_sums(workers);
    for (const int data : {1, 2, 3, 4}) {
      if (workers % data != 0) continue;
      for (const int64_t bucket : {1, 500, 1 << 20}) {
        for (const bool overlapped : {false, true}) {
          INFO(workers << " workers, " << data << " ranks, buckets of " << bucket << ", overlapped " << overlapped);
          const int64_t wrong = different(summed({data, bucket, overlapped}, workers), expected);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("in fast numerics the bits are others, and depend on the ranks") {
  const std::map<std::string, Elements> expected = expected_sums(12);
  const std::map<std::string, Elements> one = summed({1, 500}, 0);
  const std::map<std::string, Elements> three = summed({3, 500}, 0);
  for (const int64_t count : {different(one, expected), different(three, expected), different(three, one)}) {
    CHECK(count > 300);
  }
}

TEST_CASE("an owner's values reach all copies, whatever these held") {
  for (const Topology& topology : test::copied_topologies()) {
    INFO(topology.describe(false));
    const test::CopiedTables ranks(topology);
    run_thread_ranks(topology.world(), [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, topology);
      const std::unique_ptr<SumPolicy> policy = fast_sums();
      const test::CopiedHeads heads(*groups.tensor);
      const std::unique_ptr<Communicator> copies =
          groups.tensor->split(heads.part.replica_color, groups.tensor->rank(), "copies");
      Arena values("values", DeviceType::kCpu, 1 << 16), gradients("gradients", DeviceType::kCpu, 1 << 16);
      ParameterTable table;
      test::fill_with_copies(table, *groups.tensor, heads, copies.get());
      table.allocate(values, gradients, DType::kF32);
      for (const int64_t bucket : {1, 100, 1 << 20}) {
        const RowOwnership ownership = test::ownership_of(topology, ranks, world.rank(), table, bucket);
        GradientSync sync(table, ownership, groups, Stream(DeviceType::kCpu), *policy, gradients);
        const auto value = table.flat_values().span<float>();
        std::ranges::fill(value, std::nanf(""));
        const auto number = [&](const Parameter& parameter, int64_t row, int64_t col) {
          return static_cast<float>(std::ssize(parameter.name) * 10000 + row * 100 + col + bucket);
        };
        for (const OwnedRows& own : ownership.owned_rows()) {
          const int64_t cols = own.parameter->cols();
          for (int64_t i = 0; i < own.elements.size(); ++i) {
            value[static_cast<size_t>(own.elements.begin + i)] =
                number(*own.parameter, own.rows.begin + i / cols, i % cols);
          }
        }
        for (size_t b = 0; b < ownership.buckets().size(); ++b) sync.publish(b);
        sync.await_values();
        int64_t wrong = 0, copied = 0;
        table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
          for (int64_t i = 0; i < elements.size(); ++i) {
            const float expected = number(parameter, run.global.begin + i / weight.cols, i % weight.cols);
            wrong += value[static_cast<size_t>(elements.begin + i)] != expected ? 1 : 0;
          }
          copied += parameter.counted() ? 0 : elements.size();
        });
        CHECK(wrong == 0);
        CHECK((copied > 0 || groups.tensor->rank() == 0));
      }
    });
  }
}
