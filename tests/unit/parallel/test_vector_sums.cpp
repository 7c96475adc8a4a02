#include "parallel/vector_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "comm/recording_communicator.h"
#include "comm/thread_communicator.h"
#include "ordered_table.h"
#include "parallel/invariant_gradients.h"
#include "parallel/unit_partition.h"
#include "support/errors.h"
#include "support/rank_checks.h"

using namespace invar;
using test::Elements;

namespace {

const Stream kCpu(DeviceType::kCpu);
constexpr int64_t kBatch = 6, kWorkers = 3, kSequence = 10, kBlock = 2;
constexpr int64_t kQueryHeads = 7, kKvHeads = 2;

// Heads of each rank. Of KV heads there are copies where the ranks are more: counted on the first rank that has one.
struct Heads {
  std::vector<Range> held;
  std::vector<int64_t> counted;
};
Heads heads_of(int64_t heads, int ranks) {
  Heads cut;
  if (ranks <= heads) {
    cut.held = split_units(heads, ranks);
  } else {
    for (int64_t head = 0; const Range& of_head : split_units(ranks, static_cast<int>(heads))) {
      cut.held.insert(cut.held.end(), static_cast<size_t>(of_head.size()), {head, head + 1});
      ++head;
    }
  }
  for (size_t r = 0; r < cut.held.size(); ++r) {
    cut.counted.push_back(r > 0 && cut.held[r] == cut.held[r - 1] ? 0 : cut.held[r].size());
  }
  return cut;
}

// A vector of the model and the rows of its terms, for each sample of the batch those of all ranks.
struct Vector {
  std::string name;
  VectorSum::Over over;
  int64_t width;
  int64_t units;  // rows of a sample
  Elements terms = test::wide_values(kBatch * units * width, static_cast<unsigned>(std::hash<std::string>()(name)));

  float term(int64_t sample, int64_t unit, int64_t i) const {
    return terms[static_cast<size_t>((sample * units + unit) * width + i)];
  }
  // A tree over the workers' sums, each of them of samples one after another, each of which is a chain of its rows.
  Elements gradient(bool ascending) const {
    Elements workers(static_cast<size_t>(kWorkers * width), 0.0f);
    for (int64_t sample = 0; sample < kBatch; ++sample) {
      for (int64_t i = 0; i < width; ++i) {
        float sum = term(sample, ascending ? 0 : units - 1, i);
        for (int64_t unit = 1; unit < units; ++unit) sum += term(sample, ascending ? unit : units - 1 - unit, i);
        workers[static_cast<size_t>(sample / (kBatch / kWorkers) * width + i)] += sum;
      }
    }
    return test::tree_root(workers, width);
  }
};
const std::vector<Vector>& vectors() {
  static const std::vector<Vector> kVectors = {
      {"norm", VectorSum::Over::kTokens, 20, kSequence / kBlock},
      {"q_norm", VectorSum::Over::kHeads, 6, kQueryHeads},
      {"k_norm", VectorSum::Over::kHeads, 6, kKvHeads},
      {"late norm", VectorSum::Over::kTokens, 70, kSequence / kBlock},
      {"cut norm", VectorSum::Over::kSamples, 11, 1},
  };
  return kVectors;
}

WeightId add_vector(ParameterTable& table, const Vector& vector, int64_t width, VectorSum sum) {
  Parameter parameter;
  parameter.name = vector.name;
  parameter.shape = {width};
  parameter.runs = {{{0, width}, 0}};
  Weight weight;
  weight.name = vector.name;
  weight.rows = width;
  weight.cols = 1;
  weight.vector = std::move(sum);
  weight.parameters = {std::move(parameter)};
  return table.add(std::move(weight));
}

// One rank of a model of these vectors. Of "cut norm" it has some elements alone.
struct Model {
  Model(Communicator& group, bool sequence_parallel, int64_t micro_batch, DeviceType device = DeviceType::kCpu)
      : order(test::equal_order(kWorkers, kBatch, 1, 0, micro_batch)),
        region(group, sequence_parallel, kBlock),
        values("values", device, 1 << 12),
        gradients("gradients", device, 1 << 14),
        scratch("scratch", device, 1 << 16) {
    const auto rank = static_cast<size_t>(group.rank());
    columns = split_units(vectors().back().width, group.size())[rank];
    for (const Vector& vector : vectors()) {
      VectorSum sum{vector.over};
      if (vector.over == VectorSum::Over::kHeads) {
        const Heads heads = heads_of(vector.units, group.size());
        sum.held = heads.held[rank].size();
        sum.counted = heads.counted;
        first_head[vector.name] = heads.held[rank].begin;
      }
      add_vector(table, vector, columns_of(vector).size(), std::move(sum));
    }
    table.allocate(values, gradients, DType::kF32, {order.kept(), true});
  }

  Range columns_of(const Vector& vector) const {
    return vector.over == VectorSum::Over::kSamples ? columns : Range{0, vector.width};
  }

  // Adds this rank's rows of the samples; of copied heads numbers that would show.
  void add_terms(WeightId id, int64_t first_sample, const Tensor& into) const {
    const Vector& vector = vectors()[static_cast<size_t>(id)];
    const Range cols = columns_of(vector);
    const int64_t samples = region.tokens() / kSequence;
    const bool heads = vector.over == VectorSum::Over::kHeads;
    const bool copy = heads && table.weight(id).vector->counted[static_cast<size_t>(region.group().rank())] == 0;
    const int64_t first_unit =
        heads ? first_head.at(vector.name)
              : (vector.over == VectorSum::Over::kTokens ? region.local_tokens().begin / kBlock : 0);
    const int64_t rows = into.numel() / cols.size();
    for (int64_t row = 0; row < rows; ++row) {
      // By head, then sample; or all of a sample's, then the next.
      const int64_t unit = heads ? first_unit + row / samples : (first_unit + row) % vector.units;
      const int64_t sample = first_sample + (heads ? row % samples : (first_unit + row) / vector.units);
      for (int64_t i = 0; i < cols.size(); ++i) {
        float& element = into.data<float>()[row * cols.size() + i];
        CHECK(element == 0);
        element += copy ? std::nanf("") : vector.term(sample, unit, cols.begin + i);
      }
    }
  }

  SumContext context() { return {kCpu, region, scratch, DType::kF32, kSequence}; }
  // The batch in micro-batches of so many samples each.
  void train(const std::vector<int64_t>& micro_batches) {
    const ops::Numerics numerics{true};
    test::Done done;
    InvariantGradients gradient_sink(table, order, numerics, done);
    const SumContext ctx{kCpu, region, scratch, DType::kF32, kSequence};
    int64_t first = 0;
    for (const int64_t samples : micro_batches) {
      const ArenaScope scope(scratch);
      std::memset(scratch.allocate("poison", DType::kF32, {1 << 14}).raw(), 0xff, 1 << 16);
      scratch.release(0);
      region.set_tokens(samples * kSequence);
      gradient_sink.begin_micro_batch(ctx, first);
      std::vector<WeightId> backward;
      for (auto id = static_cast<WeightId>(vectors().size()); id-- > 0;) backward.push_back(id);
      for (const WeightId id : backward) {
        add_terms(id, first, gradient_sink.vector(id));
        gradient_sink.done(id);
      }
      CHECK(done.ids.empty());  // their sums are not there yet
      gradient_sink.end_micro_batch(ctx);
      CHECK(done.ids == backward);
      done.ids.clear();
      first += samples;
    }
  }

  WorkerOrder order;
  TensorRegion region;
  Arena values, gradients, scratch;
  ParameterTable table;
  Range columns;
  std::map<std::string, int64_t> first_head;
};

}  // namespace

TEST_CASE("vectors' gradients have the same bits at any layout and for any micro-batches") {
  int64_t compared = 0, descending = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const bool sequence : {false, true}) {
      for (const std::vector<int64_t>& micro_batches :
           std::vector<std::vector<int64_t>>{{6}, {1, 1, 1, 1, 1, 1}, {3, 3}, {2, 1, 3}}) {
        int64_t wrong = 0;
        run_thread_ranks(ranks, [&](Communicator& group) {
          Model model(group, sequence, std::ranges::min(micro_batches));
          model.train(micro_batches);
          const std::lock_guard turn(test::assertion_mutex());
          for (WeightId id = 0; id < static_cast<WeightId>(vectors().size()); ++id) {
            const Vector& vector = vectors()[static_cast<size_t>(id)];
            const auto of_this_rank = [&](const Elements& all) {
              const Range columns = model.columns_of(vector);
              return Elements(all.begin() + columns.begin, all.begin() + columns.end);
            };
            const auto sums = model.table.weight(id).gradient.span<float>();
            const Elements expected = of_this_rank(vector.gradient(true));
            wrong += test::different(expected, {sums.begin(), sums.end()});
            descending += test::different(expected, of_this_rank(vector.gradient(false)));
            compared += std::ssize(expected);
          }
        });
        INFO(ranks << " ranks, sequence " << sequence << ", micro-batches from " << micro_batches.front());
        CHECK(wrong == 0);
      }
    }
  }
  CHECK(descending > compared / 4);
}

TEST_CASE("vectors' terms are gathered once in a micro-batch, and only those that others need") {
  for (const bool sequence : {false, true}) {
    TrafficTable traffic;
    const auto group = make_recording_communicator(1, 3, "tensor", &traffic);
    Model model(*group, sequence, 2, DeviceType::kMeta);
    const Stream meta(DeviceType::kMeta);
    model.region.set_tokens(2 * kSequence);  // ten blocks: four, three and three
    VectorSums sums(model.table);
    CHECK(test::contains(test::message_of(ErrorKind::kFault, [&] { (void)sums.terms(0); }),
                         "terms of 'norm' outside of a micro-batch"));
    sums.begin({meta, model.region, model.scratch, DType::kF32, kSequence});
    const auto shape = [&](WeightId id) {
      const Tensor terms = sums.terms(id);
      return std::vector<int64_t>(terms.shape().begin(), terms.shape().end());
    };
    CHECK(shape(0) == std::vector<int64_t>{sequence ? 3 : 10, 20});
    CHECK(shape(1) == std::vector<int64_t>{2, 2, 6});
    CHECK(shape(2) == std::vector<int64_t>{1, 2, 6});  // a copy of the first head
    CHECK(shape(4) == std::vector<int64_t>{2, 4});
    const std::vector<ops::SamplePlace> places = {{0, true, 0}, {0, false, 0}};
    sums.finish(meta, places);
    REQUIRE(traffic.size() == 1);
    CHECK(traffic["tensor all_gather"].calls == 1);
    // In units of 64 elements the ranks give 2, 1 and 2 of heads and 7, 5 and 5 of token blocks; a ring passes on all
    // but what the next rank has.
    CHECK(traffic["tensor all_gather"].bytes == (sequence ? 22 - 7 : 5 - 2) * 64 * 4);
  }
}
