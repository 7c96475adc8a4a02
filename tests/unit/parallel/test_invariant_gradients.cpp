#include "parallel/invariant_gradients.h"

#include <algorithm>
#include <cmath>

#include "comm/self_communicator.h"
#include "ops/matmul.h"
#include "ordered_table.h"
#include "parallel/sum_policy.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using test::Elements;
using test::Gradients;

namespace {

const Stream kCpu(DeviceType::kCpu);
constexpr int64_t kBatch = 12, kWorkers = 4, kSequence = 4;

// A weight with two users, each with gradients of its own for every token of the batch.
struct Tied {
  explicit Tied(const WorkerOrder& order) {
    first = test::add_matrix(table, "tied", 5, 3);
    second = table.add_user(first.id);
    table.allocate(values, gradients, DType::kF32, {order.kept(), true});
    for (int buffer = 0; buffer < order.kept(); ++buffer) {  // as a step begins
      std::ranges::fill(table.gradients(buffer).span<float>(), buffer == 0 ? 0.0f : std::nanf(""));
    }
  }

  Arena values{"values", DeviceType::kCpu, 1 << 12};
  Arena gradients{"gradients", DeviceType::kCpu, 1 << 14};
  ParameterTable table;
  WeightUse first{0};
  WeightUse second{0};
};

// What a rank adds gradients through, in micro-batches of so many samples.
struct Rank {
  Rank(const ParameterTable& table, const WorkerOrder& order, int64_t samples, const ProductLimits& limits = {})
      : sink(table, order, numerics, done, limits) {
    region.set_tokens(samples * kSequence);
  }
  // first: of the micro-batch's samples, among the rank's. Returns the bytes of spares.
  int64_t begin(int64_t first) {
    scratch.release(0);
    sink.begin_micro_batch(ctx, first);
    return scratch.used();
  }

  std::unique_ptr<Communicator> alone = make_self_communicator("tensor");
  TensorRegion region{*alone, false, kSequence};
  Arena scratch{"scratch", DeviceType::kCpu, 1 << 14};
  SumContext ctx{kCpu, region, scratch, DType::kF32, kSequence};
  ops::Numerics numerics{true};
  test::Done done;
  InvariantGradients sink;
};

// Backward passes of a rank's samples in micro-batches.
void backward(const Tied& tied, const WorkerOrder& order, Range samples, int64_t micro_batch,
              std::vector<Gradients>& uses) {
  Rank rank(tied.table, order, micro_batch);
  for (int64_t begin = 0; begin < samples.size(); begin += micro_batch) {
    rank.begin(begin);
    for (Gradients& use : uses) {
      const Range tokens{0, micro_batch * kSequence};
      const int64_t first = (samples.begin + begin) * kSequence;
      int64_t next = 0, calls = 0;
      rank.sink.add_lookups(rank.ctx, use.use, [&](Range part, const ops::SampleSums& sums) {
        CHECK((part.begin == next && std::ssize(sums.places) * kSequence == part.size()));
        CHECK(std::ssize(sums.buffers) == order.kept());
        use.add({first + part.begin, first + part.end}, sums);
        next = part.end;
        ++calls;
      });
      CHECK(next == tokens.end);
      if (micro_batch == samples.size()) CHECK(calls == 1);
    }
    rank.sink.end_micro_batch(rank.ctx);
  }
}

}  // namespace

TEST_CASE("invariant gradients: lookups get the tree's nodes, for any ranks and micro-batches, for both users") {
  int64_t compared = 0, control = 0;
  for (const int data : {1, 2, 4}) {
    for (const int64_t micro_batch : {1, 2, 3, 6, 12}) {  // 2: parts of two workers in one
      if (kBatch / data % micro_batch != 0) continue;
      INFO("data " << data << ", micro-batch " << micro_batch);
      std::vector<std::vector<Elements>> nodes(2);  // by use and rank
      std::vector<Elements> expected, chains;
      for (int rank = 0; rank < data; ++rank) {
        const WorkerOrder order = test::equal_order(kWorkers, kBatch, data, rank, micro_batch);
        const Tied tied(order);
        REQUIRE(tied.table.weight(tied.second.id).second_user >= 0);
        std::vector<Gradients> uses = {{tied.table, tied.first, kBatch * kSequence},
                                       {tied.table, tied.second, kBatch * kSequence}};
        backward(tied, order, {kBatch * rank / data, kBatch * (rank + 1) / data}, micro_batch, uses);
        for (size_t use = 0; use < 2; ++use) {
          Elements& mine = nodes[use].emplace_back();
          for (size_t node = 0; node < order.plan().nodes(rank).size(); ++node) {
            const auto span = tied.table.gradient(uses[use].use, static_cast<int>(node)).span<float>();
            mine.insert(mine.end(), span.begin(), span.end());
          }
          if (rank > 0) continue;
          expected.push_back(test::tree_root(uses[use].worker_sums(kWorkers), uses[use].elements));
          chains.push_back(uses[use].worker_sums(1));
        }
      }
      for (size_t use = 0; use < 2; ++use) {
        const TreePlan plan = test::equal_order(kWorkers, kBatch, data, 0).plan();
        const Elements root = test::root_of(plan, nodes[use], std::ssize(expected[use]));
        CHECK(test::different(root, expected[use]) == 0);
        control += test::different(root, chains[use]);
        compared += std::ssize(root);
      }
    }
  }
  CHECK(control > compared / 2);
}

namespace {

// Operands of a 5 × 3 product, for every token of the batch.
struct Operands {
  Tensor a_of(Range tokens) { return view_of(a).view({kBatch * kSequence, 5}).rows(tokens.begin, tokens.end); }
  Tensor b_of(Range tokens) { return view_of(b).view({kBatch * kSequence, 3}).rows(tokens.begin, tokens.end); }
  // The definition: a worker adds the products of its samples, each of `chunk` tokens or fewer, from zero.
  Elements worker_sums(int64_t chunk) {
    Elements sums(kWorkers * 15, 0.0f), product(15);
    const int64_t length = std::min(chunk, kSequence);
    for (int64_t token = 0; token < kBatch * kSequence; token += length) {
      ops::matmul(kCpu, a_of({token, token + length}), ops::Transpose::kYes, b_of({token, token + length}),
                  ops::Transpose::kNo, view_of(product).view({5, 3}));
      const int64_t worker = token * kWorkers / (kBatch * kSequence);
      for (size_t i = 0; i < 15; ++i) sums[static_cast<size_t>(worker) * 15 + i] += product[i];
    }
    return sums;
  }

  Elements a = test::wide_values(kBatch * kSequence * 5, 1), b = test::wide_values(kBatch * kSequence * 3, 2);
};

// Nodes of all ranks after products in micro-batches and chunks.
std::vector<Elements> nodes_of(Operands& operands, int data, int64_t micro_batch, int64_t chunk,
                               const ProductLimits& limits) {
  std::vector<Elements> nodes;
  for (int index = 0; index < data; ++index) {
    const WorkerOrder order = test::equal_order(kWorkers, kBatch, data, index, micro_batch);
    const Tied tied(order);
    Rank rank(tied.table, order, micro_batch, limits);
    int64_t spares = 0;
    for (int64_t begin = 0; begin < kBatch / data; begin += micro_batch) {
      spares = rank.begin(begin);
      CHECK(spares == (order.sums() - order.kept()) * 256);
      for (int64_t token = 0; token < micro_batch * kSequence; token += chunk) {
        const Range tokens{token, std::min(token + chunk, micro_batch * kSequence)};
        const int64_t first = (kBatch * index / data + begin) * kSequence;
        const Range all{first + tokens.begin, first + tokens.end};
        rank.sink.add_product(rank.ctx, tied.second, tokens, operands.a_of(all), operands.b_of(all));
        CHECK(rank.scratch.used() == spares);
      }
      rank.sink.end_micro_batch(rank.ctx);
    }
    const bool at_once = std::min(chunk, micro_batch * kSequence) > kSequence && limits.few_elements >= 15;
    CHECK((rank.scratch.high_water() > spares) == at_once);
    Elements& mine = nodes.emplace_back();
    for (size_t node = 0; node < order.plan().nodes(index).size(); ++node) {
      const auto span = tied.table.gradient(tied.second, static_cast<int>(node)).span<float>();
      mine.insert(mine.end(), span.begin(), span.end());
    }
    for (const float x : tied.table.gradient(tied.first, 0).span<float>()) CHECK(x == 0);
  }
  return nodes;
}

}  // namespace

TEST_CASE("invariant gradients: products get the tree's nodes, for any ranks, micro-batches, chunks and limits") {
  Operands operands;
  const Elements other = test::tree_root(operands.worker_sums(1), 15);
  // All samples at once or in place; all rows, two at a time and one at a time.
  const ProductLimits limits = GENERATE(values<ProductLimits>(
      {{}, {15, 2 * 3 * 4 * 12, 1}, {15, 1, 1}, {15, 1, 2}, {14, 1 << 20, 256}, {14, 2 * 3 * 4, 1}, {14, 1, 2}}));
  CAPTURE(limits.few_elements, limits.bytes, limits.tile_rows);
  for (const int data : {1, 2, 4}) {
    for (const int64_t micro_batch : {1, 2, 3, 6, 12}) {
      if (kBatch / data % micro_batch != 0) continue;
      for (const int64_t chunk : {2, 4, 8, 48}) {
        INFO("data " << data << ", micro-batch " << micro_batch << ", chunks of " << chunk);
        const std::vector<Elements> nodes = nodes_of(operands, data, micro_batch, chunk, limits);
        const Elements root = test::root_of(test::equal_order(kWorkers, kBatch, data, 0).plan(), nodes, 15);
        CHECK(test::different(root, test::tree_root(operands.worker_sums(chunk), 15)) == 0);
        CHECK(test::different(root, other) > 0);
      }
    }
  }
}

TEST_CASE("invariant gradients: products that wait to be added take what the limit says, or one run of tiles") {
  Operands operands;
  const WorkerOrder order = test::equal_order(kWorkers, kBatch, 1, 0, kBatch);
  const auto taken = [&](const ProductLimits& limits) {
    const Tied tied(order);
    Rank rank(tied.table, order, kBatch, limits);
    const int64_t spares = rank.begin(0);
    const Range all{0, kBatch * kSequence};
    rank.sink.add_product(rank.ctx, tied.first, all, operands.a_of(all), operands.b_of(all));
    return rank.scratch.high_water() - spares;
  };
  constexpr int64_t kRow = kBatch * 3 * 4;  // 144 bytes of all samples' products of one row
  CHECK(taken({15, 5 * kRow, 1}) == 768);
  CHECK(taken({15, 4 * kRow - 1, 1}) == 512);  // three rows
  CHECK(taken({15, 4 * kRow - 1, 2}) == 512);  // two
  CHECK(taken({15, 1, 1}) == 256);
  CHECK(taken({15, 1, 4}) == 768);
}

TEST_CASE("invariant gradients: products of other tokens than whole samples or a part of one are refused") {
  Operands operands;
  const WorkerOrder order = test::equal_order(kWorkers, kBatch, 1, 0);
  const Tied tied(order);
  Rank rank(tied.table, order, 2);
  rank.begin(0);
  const auto refused = [&](Range tokens, Range of_a, Range of_b) {
    return test::message_of(ErrorKind::kFault, [&] {
      rank.sink.add_product(rank.ctx, tied.first, tokens, operands.a_of(of_a), operands.b_of(of_b));
    });
  };
  CHECK(test::contains(refused({2, 6}, {2, 6}, {2, 6}), "tokens 2 to 6 of samples of 4"));
  CHECK(test::contains(refused({4, 4}, {4, 4}, {4, 4}), "tokens 4 to 4 of samples of 4"));
  CHECK(test::contains(refused({0, 8}, {0, 7}, {0, 8}), "'tied': a product of f32 (7, 5) and f32 (8, 3) for 8 tokens"));
  CHECK(test::contains(refused({0, 8}, {0, 8}, {0, 4}), "'tied': a product of f32 (8, 5) and f32 (4, 3) for 8 tokens"));
}

TEST_CASE("invariant gradients: a sum that no micro-batch leaves is finished before other products are added") {
  Operands operands;
  const WorkerOrder order = test::equal_order(kWorkers, kBatch, 1, 0, 6);  // the second worker's in a spare
  REQUIRE(order.kept() == 1);
  const Tied tied(order);
  Rank rank(tied.table, order, 6);
  CHECK(rank.begin(0) == 2 * 256);
  const auto add = [&](const WeightUse& use, int64_t begin, int64_t end) {
    const Range tokens{begin * kSequence, end * kSequence};
    rank.sink.add_product(rank.ctx, use, tokens, operands.a_of(tokens), operands.b_of(tokens));
  };
  const auto refused = [&](const auto& f) { return test::message_of(ErrorKind::kFault, f); };
  add(tied.first, 0, 3);
  add(tied.second, 0, 5);
  CHECK(test::contains(refused([&] { add(tied.first, 3, 4); }),
                       "'tied' is added to while a sum of 'tied' is unfinished"));
  CHECK(test::contains(refused([&] { rank.sink.end_micro_batch(rank.ctx); }), "a sum of 'tied' is unfinished"));
  add(tied.second, 5, 6);
  add(tied.first, 3, 6);
  rank.sink.end_micro_batch(rank.ctx);
}

TEST_CASE("invariant gradients: a table of too few buffers is refused") {
  const WorkerOrder order = test::equal_order(kWorkers, kBatch, 1, 0, 6);
  const WorkerOrder one_by_one = test::equal_order(kWorkers, kBatch, 1, 0, 1);
  REQUIRE(one_by_one.kept() > order.kept());
  const Tied tied(order);
  Rank rank(tied.table, one_by_one, 6);
  CHECK(test::contains(test::message_of(ErrorKind::kFault, [&] { rank.begin(0); }), "1 gradient buffers of 3"));
}

TEST_CASE("invariant gradients: spares are as large as the largest weight with products") {
  const WorkerOrder order = test::equal_order(kWorkers, kBatch, 1, 0, kBatch);
  Arena values("values", DeviceType::kCpu, 1 << 14), gradients("gradients", DeviceType::kCpu, 1 << 14);
  ParameterTable table;
  test::add_matrix(table, "multiplied", 70, 3);
  Weight looked_up = table.weight(test::add_matrix(table, "larger", 80, 3));
  looked_up.name = "looked up";
  looked_up.lookups_only = true;
  looked_up.rows = 200;
  table.add(std::move(looked_up));
  table.allocate(values, gradients, DType::kF32, {order.kept(), true});
  Rank rank(table, order, kBatch);
  CHECK(rank.begin(0) == (order.sums() - 1) * 1024);  // 960 bytes and the alignment
  Operands operands;
  const Range all{0, kBatch * kSequence};
  CHECK(test::contains(
      test::message_of(ErrorKind::kFault,
                       [&] { rank.sink.add_product(rank.ctx, 2, all, operands.a_of(all), operands.b_of(all)); }),
      "'looked up': a product"));
}

TEST_CASE("fast gradients: one part, added to the gradient that both users share") {
  Arena values("values", DeviceType::kCpu, 1 << 12);
  Arena gradients("gradients", DeviceType::kCpu, 1 << 12);
  ParameterTable table;
  const WeightUse first = test::add_matrix(table, "tied", 5, 3);
  const WeightUse second = table.add_user(first.id);
  Weight looked_up = table.weight(first.id);
  looked_up.name = "looked up";
  looked_up.lookups_only = true;
  const WeightId lookups_only = table.add(std::move(looked_up));
  const std::unique_ptr<SumPolicy> sums = fast_sums();
  table.allocate(values, gradients, DType::kF32, sums->gradient_layout());
  CHECK(table.gradient_buffers() == 1);
  CHECK(table.weight(first.id).second_user == -1);
  std::ranges::fill(table.flat_gradients().span<float>(), 1.0f);
  test::Done done;
  const std::unique_ptr<GradientSink> sink = sums->gradients(table, done);
  const auto alone = make_self_communicator("tensor");
  TensorRegion region(*alone, false);
  region.set_tokens(8);
  Arena scratch("scratch", DeviceType::kCpu, 0);
  const SumContext ctx{kCpu, region, scratch, DType::kF32, 4};
  sink->begin_micro_batch(ctx, 0);
  std::vector<Range> parts;
  for (const WeightUse& use : {first, second}) {
    sink->add_lookups(ctx, use, [&](Range part, const ops::SampleSums& into) {
      parts.push_back(part);
      CHECK((into.places.size() == 1 && into.buffers.size() == 1));
      CHECK((!into.places[0].clears && into.places[0].buffer == 0 && into.places[0].joins == 0));
      for (float& x : into.buffers[0].span<float>()) x += 2;
    });
  }
  CHECK(parts == std::vector<Range>{{0, 8}, {0, 8}});
  for (const float x : table.weight(first.id).gradient.span<float>()) CHECK(x == 5.0f);
  CHECK(sink->vector(first.id).raw() == table.weight(first.id).gradient.raw());
  Elements a(2 * 5, 1.0f), b(2 * 3, 2.0f);
  const Tensor left = view_of(a).view({2, 5}), right = view_of(b).view({2, 3});
  sink->add_product(ctx, first, {3, 5}, left, right);
  for (const float x : table.weight(first.id).gradient.span<float>()) CHECK(x == 9.0f);
  const auto refused = [&](WeightId id, Range tokens) {
    return test::message_of(ErrorKind::kFault, [&] { sink->add_product(ctx, id, tokens, left, right); });
  };
  CHECK(test::contains(refused(first.id, {3, 6}), "'tied': a product of f32 (2, 5) and f32 (2, 3) for 3 tokens"));
  CHECK(test::contains(refused(lookups_only, {3, 5}), "'looked up': a product"));
  CHECK(done.ids.empty());
  sink->done(second.id);
  CHECK(done.ids == std::vector<WeightId>{first.id});
  sink->end_micro_batch(ctx);
}
