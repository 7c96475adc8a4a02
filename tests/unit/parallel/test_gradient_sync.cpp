// GradientSync in fixed order; test_row_ownership.cpp has the rest.
#include "parallel/gradient_sync.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "comm/thread_communicator.h"
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

// Each weight's gradient after a step, from the ranks that own its rows. workers = 0: any order.
std::map<std::string, Elements> summed(const Cut& cut, int64_t workers) {
  std::map<std::string, Elements> sums;
  run_thread_ranks(cut.data, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {1, cut.data});
    const Stream stream(DeviceType::kCpu);
    const std::optional<WorkerOrder> order =
        workers > 0 ? std::optional(test::equal_order(workers, kBatch, cut.data, world.rank(), kBatch / cut.data))
                    : std::nullopt;
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 18);
    ParameterTable table(workers > 0 ? 8 : 0);
    std::vector<WeightUse> uses;
    for (const auto& [name, rows, cols] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
             {"a", 7, 9}, {"b", 30, 5}, {"c", 1, 200}, {"d", 64, 16}}) {
      uses.push_back(test::add_matrix(table, name, rows, cols));
    }
    const WeightUse second = table.add_user(uses[1].id);
    table.allocate(values, gradients, DType::kF32, order ? order->kept() : 1);
    const RowOwnership ownership(table, cut.data, world.rank(), cut.bucket);
    GradientSync sync(table, ownership, groups, stream, order ? &*order : nullptr, gradients);
    ResidentWeights weights(table);
    TensorRegion region(*groups.tensor, false, 1);
    region.set_tokens(kBatch / cut.data * kSequence);
    if (order) weights.begin_micro_batch(stream, region, gradients, {*order, 0, kSequence});
    if (cut.overlapped) sync.begin_last_micro_batch();
    const int64_t first = region.tokens() * world.rank();
    const auto add = [&](const WeightUse& use, int term) {
      Gradients all(table, {use.id, term}, kBatch * kSequence);
      weights.accumulate_lookups(stream, use, {0, region.tokens()}, [&](Range tokens, const ops::SampleSums& into) {
        all.add({first + tokens.begin, first + tokens.end}, into);
      });
      sync.gradient_done(use.id);
    };
    for (size_t i = uses.size(); i-- > 0;) add(uses[i], 0);
    add(second, 1);
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
  ParameterTable table(8);
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

TEST_CASE("in fixed order any number of data ranks gives the bits of the definition, at any bucket size") {
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

TEST_CASE("in any order the bits are others, and depend on the ranks") {
  const std::map<std::string, Elements> expected = expected_sums(12);
  const std::map<std::string, Elements> one = summed({1, 500}, 0);
  const std::map<std::string, Elements> three = summed({3, 500}, 0);
  for (const int64_t count : {different(one, expected), different(three, expected), different(three, one)}) {
    CHECK(count > 300);
  }
}
