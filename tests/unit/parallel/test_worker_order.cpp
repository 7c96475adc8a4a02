#include "parallel/worker_order.h"

#include <cmath>

#include "config/contract.h"
#include "support/catch.h"
#include "support/errors.h"
#include "tree_values.h"

using namespace invar;
using test::Elements;

namespace {

using Places = std::vector<std::vector<int>>;

// {buffer, clears, joins} of each sample of a rank.
Places places_of(const WorkerOrder& order, int64_t samples, LeafKind gradient = LeafKind::kOwnBuffer) {
  Places places;
  for (const WorkerOrder::Place& place : order.of({0, samples}, gradient)) {
    places.push_back({place.buffer, place.clears ? 1 : 0, place.joins});
  }
  return places;
}

constexpr int64_t kElements = 8;

// What a rank's buffers hold after its samples, in the order of its nodes; those that are not kept are lost with every
// micro-batch. samples (B, kElements).
Elements nodes_of(const WorkerOrder& order, Range own, int64_t micro_batch, const Elements& samples,
                  LeafKind gradient) {
  Elements buffers(static_cast<size_t>(order.sums() * kElements), std::nanf(""));
  std::fill_n(buffers.begin(), kElements, 0.0f);  // the first one, as a step begins
  const auto at = [](int64_t row, int64_t i) { return static_cast<size_t>(row * kElements + i); };
  for (int64_t sample = 0; sample < own.size(); ++sample) {
    if (sample % micro_batch == 0) std::fill(buffers.begin() + order.kept() * kElements, buffers.end(), std::nanf(""));
    const WorkerOrder::Place& place = order.of(sample, gradient);
    for (int64_t i = 0; i < kElements; ++i) {
      if (place.clears) buffers[at(place.buffer, i)] = 0;
      buffers[at(place.buffer, i)] += samples[at(own.begin + sample, i)];
      for (int join = 0; join < place.joins; ++join) {
        buffers[at(place.buffer - join - 1, i)] += buffers[at(place.buffer - join, i)];
      }
    }
  }
  buffers.resize(static_cast<size_t>(order.kept() * kElements));
  return buffers;
}

// The definition: workers' sums, each from zero and ascending.
Elements worker_sums(const Elements& samples, int64_t workers, int64_t batch) {
  Elements sums(static_cast<size_t>(workers * kElements), 0.0f);
  for (int64_t worker = 0; worker < workers; ++worker) {
    for (int64_t sample = first_sample(worker, workers, batch); sample < first_sample(worker + 1, workers, batch);
         ++sample) {
      for (int64_t i = 0; i < kElements; ++i) {
        sums[static_cast<size_t>(worker * kElements + i)] += samples[static_cast<size_t>(sample * kElements + i)];
      }
    }
  }
  return sums;
}

}  // namespace

TEST_CASE("two samples per worker: which buffer, whether it is cleared, what joins") {
  const WorkerOrder one = test::equal_order(4, 8, 1, 0);
  CHECK(one.sums() == 3);
  CHECK(places_of(one, 8) ==
        Places{{0, 0, 0}, {0, 0, 0}, {1, 1, 0}, {1, 0, 1}, {1, 1, 0}, {1, 0, 0}, {2, 1, 0}, {2, 0, 2}});
  CHECK(one.plan().total_nodes() == 1);
  for (const int rank : {0, 1}) {
    const WorkerOrder half = test::equal_order(4, 8, 2, rank);
    CHECK(half.sums() == 2);
    CHECK(places_of(half, 4) == Places{{0, 0, 0}, {0, 0, 0}, {1, 1, 0}, {1, 0, 1}});
    CHECK(half.plan().total_nodes() == 2);
  }
  const WorkerOrder quarter = test::equal_order(4, 8, 4, 2);
  CHECK(quarter.sums() == 1);
  CHECK(places_of(quarter, 2) == Places{{0, 0, 0}, {0, 0, 0}});
}

TEST_CASE("a batch that workers do not divide: they have two, three and three samples of eight") {
  const WorkerOrder order = test::equal_order(3, 8, 1, 0);
  CHECK(places_of(order, 8) ==
        Places{{0, 0, 0}, {0, 0, 0}, {1, 1, 0}, {1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 0, 0}, {1, 0, 1}});
}

TEST_CASE("an addable gradient of a worker's only sample goes to its sibling's sum at once") {
  const WorkerOrder one = test::equal_order(8, 8, 1, 0);
  CHECK(places_of(one, 8, LeafKind::kAddable) ==
        Places{{0, 0, 0}, {0, 0, 0}, {1, 1, 0}, {1, 0, 1}, {1, 1, 0}, {1, 0, 0}, {2, 1, 0}, {2, 0, 2}});
  const WorkerOrder two = test::equal_order(4, 8, 1, 0);  // its sum is not a finished value before the second
  CHECK(places_of(two, 8, LeafKind::kAddable) == places_of(two, 8));
  const WorkerOrder mixed = test::equal_order(4, 6, 1, 0);  // one, two, one and two samples
  CHECK(places_of(mixed, 6, LeafKind::kAddable) ==
        Places{{0, 0, 0}, {1, 1, 0}, {1, 0, 1}, {1, 1, 0}, {2, 1, 0}, {2, 0, 2}});
}

TEST_CASE("sums are kept that a micro-batch leaves to the next one or to the end") {
  const auto kept = [](int64_t workers, int64_t batch, int data, int64_t micro_batch, int data_rank = 0) {
    const WorkerOrder order = test::equal_order(workers, batch, data, data_rank, micro_batch);
    CHECK(order.kept() <= order.sums());
    const Range own{batch * data_rank / data, batch * (data_rank + 1) / data};
    CHECK((count_sums(workers, batch, own, micro_batch) == SumCounts{order.kept(), order.sums()}));
    return order.kept();
  };
  CHECK(test::equal_order(8, 8, 1, 0).sums() == 4);
  CHECK(kept(8, 8, 1, 1) == 3);  // 0 to 3, 4 and 5, 6
  CHECK(kept(8, 8, 1, 2) == 2);
  CHECK(kept(8, 8, 1, 4) == 1);
  CHECK(kept(8, 8, 1, 8) == 1);
  CHECK(kept(8, 8, 1, 3) == 2);   // 0 and 1, 2; 0 to 3, 4 and 5
  CHECK(kept(8, 16, 4, 2) == 1);  // a worker each
  CHECK(kept(8, 16, 4, 1) == 2);  // half a worker
  CHECK(kept(8, 16, 4, 4) == 1);
  CHECK(kept(6, 6, 2, 3, 0) == 1);
  CHECK(kept(4, 12, 1, 2) == 3);  // 0 and 1, 2, a third of 3
  CHECK(kept(4, 12, 1, 6) == 1);
  CHECK(kept(6, 6, 3, 2, 1) == 2);  // a cover of two nodes
}

TEST_CASE("one worker is one sum over all samples") {
  const WorkerOrder order = test::equal_order(1, 3, 1, 0);
  CHECK(order.sums() == 1);
  CHECK(places_of(order, 3) == Places{{0, 0, 0}, {0, 0, 0}, {0, 0, 0}});
}

TEST_CASE("random workers, batches, ranks and micro-batches give the bits of one rank, and of the definition") {
  std::mt19937 generator(3);
  int64_t compared = 0, wrong = 0, control = 0;
  for (unsigned run = 0; run < 6000; ++run) {
    const auto data = static_cast<int>(generator() % 8 + 1);
    const int64_t batch = data * static_cast<int64_t>(generator() % 12 + 1);
    const auto workers = static_cast<int64_t>(generator() % static_cast<uint64_t>(batch) + 1);
    if (workers < data || !begins_with_workers(data, workers, batch)) continue;
    const Elements samples = test::wide_values(batch * kElements, run);
    const Elements expected = test::tree_root(worker_sums(samples, workers, batch), kElements);
    const auto micro_batch = static_cast<int64_t>(generator() % static_cast<uint64_t>(batch / data) + 1);
    for (const LeafKind gradient : {LeafKind::kOwnBuffer, LeafKind::kAddable}) {
      std::vector<Elements> nodes;
      for (int rank = 0; rank < data; ++rank) {
        const WorkerOrder order = test::equal_order(workers, batch, data, rank, micro_batch);
        const Range own{batch * rank / data, batch * (rank + 1) / data};
        nodes.push_back(nodes_of(order, own, micro_batch, samples, gradient));
      }
      wrong +=
          test::different(test::root_of(test::equal_order(workers, batch, data, 0).plan(), nodes, kElements), expected);
    }
    control += test::different(worker_sums(samples, 1, batch), expected);
    compared += kElements;
  }
  CHECK(wrong == 0);
  CHECK(compared > 1000 * kElements);
  CHECK(control > compared / 3);
}

TEST_CASE("ranks that do not hold whole workers are refused") {
  const auto refused = [](int64_t workers, int64_t batch, int data, const std::string& message) {
    test::require_error(ErrorKind::kConfig, {message}, {"numerics.workers", "train.global_batch_size"},
                        [&] { test::equal_order(workers, batch, data, 0); });
  };
  refused(4, 12, 3, "12 samples over 3 data-parallel ranks do not part where those of 4 workers do");
  refused(2, 8, 4, "4 data-parallel ranks");  // a rank without a worker
  refused(4, 8, 3, "3 data-parallel ranks");  // unequal parts, the first with a worker, the second with one and a half
  test::require_error(ErrorKind::kFault, {"9 workers for 8 samples"}, [] { test::equal_order(9, 8, 1, 0); });
}
