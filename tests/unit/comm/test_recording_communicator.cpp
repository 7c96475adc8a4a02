#include "comm/recording_communicator.h"

#include "support/catch.h"
#include "support/guarded_buffer.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kMeta);

Tensor meta(DType dtype, int64_t count) {
  return Tensor(nullptr, dtype, DeviceType::kMeta, {count});
}

// Bytes of one call on rank `rank` of `size`.
template <class F>
int64_t bytes_of(const std::string& operation, int rank, int size, F call) {
  TrafficTable table;
  const auto group = make_recording_communicator(rank, size, "tensor", &table);
  call(*group);
  CHECK(table.size() == 1);
  const Traffic& traffic = table["tensor " + operation];
  CHECK(traffic.calls == 1);
  return traffic.bytes;
}

}  // namespace

TEST_CASE("recorded bytes are those of the ring algorithm") {
  const int p = 4;
  for (int rank = 0; rank < p; ++rank) {
    const auto counts = equal_counts(p, 100);
    CHECK(bytes_of("all_reduce", rank, p, [&](Communicator& group) {
            group.all_reduce(kStream, meta(DType::kBF16, 400), ReduceOp::kSum);
          }) == 2 * 400 * 3 / 4 * 2);
    CHECK(bytes_of("all_gather", rank, p, [&](Communicator& group) {
            group.all_gather(kStream, meta(DType::kF32, 100), meta(DType::kF32, 400), counts);
          }) == 400 * 3 / 4 * 4);
    CHECK(bytes_of("reduce_scatter", rank, p, [&](Communicator& group) {
            group.reduce_scatter(kStream, meta(DType::kF64, 400), meta(DType::kF64, 100), counts, ReduceOp::kSum);
          }) == 400 * 3 / 4 * 8);
    CHECK(bytes_of("all_to_all", rank, p, [&](Communicator& group) {
            group.all_to_all(kStream, meta(DType::kI32, 400), counts, meta(DType::kI32, 400), counts);
          }) == 400 * 3 / 4 * 4);
    const int64_t chain = bytes_of("broadcast", rank, p,
                                   [&](Communicator& group) { group.broadcast(kStream, meta(DType::kI64, 10), 1); });
    CHECK(chain == (rank == 0 ? 0 : 80));
    const int peer = (rank + 1) % p;
    CHECK(bytes_of("send", rank, p, [&](Communicator& group) { group.send(kStream, meta(DType::kF32, 7), peer); }) ==
          28);
    CHECK(bytes_of("receive", rank, p,
                   [&](Communicator& group) { group.receive(kStream, meta(DType::kF32, 7), peer); }) == 0);
    CHECK(bytes_of("barrier", rank, p, [&](Communicator& group) { group.barrier(); }) == 0);
  }
}

// Over all ranks each element travels size - 1 times per pass, however it is cut.
TEST_CASE("recorded bytes of unequal parts add up over the ranks") {
  const std::vector<int64_t> counts = {7, 0, 2};
  int64_t gather = 0, scatter = 0, reduce = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const int64_t own = counts[static_cast<size_t>(rank)];
    gather += bytes_of("all_gather", rank, 3, [&](Communicator& group) {
      group.all_gather(kStream, meta(DType::kF32, own), meta(DType::kF32, 9), counts);
    });
    scatter += bytes_of("reduce_scatter", rank, 3, [&](Communicator& group) {
      group.reduce_scatter(kStream, meta(DType::kF32, 9), meta(DType::kF32, own), counts, ReduceOp::kMax);
    });
    reduce += bytes_of("all_reduce", rank, 3,
                       [&](Communicator& group) { group.all_reduce(kStream, meta(DType::kF32, 10), ReduceOp::kSum); });
  }
  CHECK(gather == 9 * 2 * 4);
  CHECK(scatter == 9 * 2 * 4);
  CHECK(reduce == 2 * 10 * 2 * 4);
  // A ring hands a rank's successor everything but the successor's own part.
  CHECK(bytes_of("all_gather", 0, 3, [&](Communicator& group) {
          group.all_gather(kStream, meta(DType::kF32, 7), meta(DType::kF32, 9), counts);
        }) == 9 * 4);
  CHECK(bytes_of("reduce_scatter", 0, 3, [&](Communicator& group) {
          group.reduce_scatter(kStream, meta(DType::kF32, 9), meta(DType::kF32, 7), counts, ReduceOp::kSum);
        }) == 2 * 4);
}

TEST_CASE("calls and bytes add up in the table, by group and operation") {
  TrafficTable table;
  const auto tensor = make_recording_communicator(0, 2, "tensor", &table);
  const auto data = make_recording_communicator(1, 8, "data", &table);
  tensor->all_reduce(kStream, meta(DType::kF32, 10), ReduceOp::kSum);
  tensor->all_reduce(kStream, meta(DType::kF32, 30), ReduceOp::kSum);
  data->all_reduce(kStream, meta(DType::kF32, 80), ReduceOp::kSum);
  data->barrier();
  CHECK(table.size() == 3);
  CHECK(table["tensor all_reduce"].calls == 2);
  CHECK(table["tensor all_reduce"].bytes == 40 * 4);
  CHECK(table["data all_reduce"].bytes == 2 * 70 * 4);
  CHECK(table["data barrier"].calls == 1);
}

TEST_CASE("a recorded group of one sends nothing") {
  TrafficTable table;
  const auto group = make_recording_communicator(0, 1, "tensor", &table);
  group->all_reduce(kStream, meta(DType::kF32, 10), ReduceOp::kSum);
  group->all_gather(kStream, meta(DType::kF32, 10), meta(DType::kF32, 10), equal_counts(1, 10));
  group->reduce_scatter(kStream, meta(DType::kF32, 10), meta(DType::kF32, 10), equal_counts(1, 10), ReduceOp::kSum);
  group->broadcast(kStream, meta(DType::kF32, 10), 0);
  for (const auto& [key, traffic] : table) {
    INFO(key);
    CHECK(traffic.calls == 1);
    CHECK(traffic.bytes == 0);
  }
}

TEST_CASE("a host scalar is counted and keeps its value") {
  TrafficTable table;
  const auto group = make_recording_communicator(0, 4, "data", &table);
  CHECK(all_reduce_value(*group, int64_t{42}, ReduceOp::kSum) == 42);
  CHECK(all_reduce_value(*group, 1.5, ReduceOp::kMax) == 1.5);
  CHECK(table["data all_reduce"].calls == 2);
}

TEST_CASE("a recorded group checks arguments, takes meta only and cannot split") {
  TrafficTable table;
  const auto group = make_recording_communicator(1, 4, "tensor", &table);
  GuardedBuffer<float> two(2), eight(8);
  const auto counts = equal_counts(4, 2);
  CHECK_THROWS_WITH(group->all_reduce(kStream, two.tensor(), ReduceOp::kSum),
                    "all_reduce in group 'tensor' (rank 1 of 4): f32 (2) is on cpu; a recorded group takes meta");
  CHECK_THROWS_AS(group->all_gather(kStream, two.tensor(), eight.tensor(), counts), Error);
  CHECK_THROWS_AS(group->reduce_scatter(kStream, eight.tensor(), two.tensor(), counts, ReduceOp::kSum), Error);
  CHECK_THROWS_AS(group->broadcast(kStream, two.tensor(), 0), Error);
  CHECK_THROWS_AS(group->send(kStream, two.tensor(), 0), Error);
  CHECK_THROWS_AS(group->receive(kStream, two.tensor(), 0), Error);
  GuardedBuffer<float> other(8);
  CHECK_THROWS_AS(group->all_to_all(kStream, eight.tensor(), counts, other.tensor(), counts), Error);

  CHECK_THROWS_AS(group->all_gather(kStream, meta(DType::kF32, 2), meta(DType::kF32, 9), counts), Error);
  CHECK_THROWS_AS(group->broadcast(kStream, meta(DType::kF32, 2), 4), Error);
  CHECK_THROWS_AS(group->send(kStream, meta(DType::kF32, 2), 1), Error);
  CHECK_THROWS_AS(group->split(0, 0, "part"), Error);
  CHECK_THROWS_AS(make_recording_communicator(4, 4, "tensor", &table), Error);
  CHECK_THROWS_AS(make_recording_communicator(0, 4, "tensor", nullptr), Error);
  CHECK(table.empty());
}

}  // namespace invar
