#include "comm/fake_communicator.h"

#include "support/catch.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kCpu);

Tensor of(std::vector<float>& values) {
  return Tensor(values.data(), DType::kF32, DeviceType::kCpu, {std::ssize(values)});
}

}  // namespace

TEST_CASE("what peers that do not exist would give is made of what the rank has") {
  const auto group = make_fake_communicator(1, 3, "tensor");
  CHECK(group->size() == 3);
  std::vector<float> own = {1, 2, 3}, all(7, -1);
  group->all_gather(kStream, of(own), of(all), std::vector<int64_t>{2, 3, 2});
  CHECK(all == std::vector<float>{1, 2, 1, 2, 3, 1, 2});
  std::vector<float> in_place = {-1, 5, 6, -1, -1, -1};
  group->all_gather(kStream, of(in_place).rows(1, 3), of(in_place), std::vector<int64_t>{1, 2, 3});
  CHECK(in_place == std::vector<float>{5, 5, 6, 5, 6, 5});

  std::vector<float> terms = {1, 2, 3, 4, 5, 6}, sum(2);
  group->reduce_scatter(kStream, of(terms), of(sum), equal_counts(3, 2), ReduceOp::kSum);
  CHECK(sum == std::vector<float>{3, 4});
  group->all_reduce(kStream, of(terms), ReduceOp::kSum);
  CHECK(terms == std::vector<float>{1, 2, 3, 4, 5, 6});

  std::vector<float> received(5, -1);
  group->all_to_all(kStream, of(own), equal_counts(3, 1), of(received), std::vector<int64_t>{3, 1, 1});
  CHECK(received == std::vector<float>{1, 2, 3, 1, 1});
  std::vector<float> message(4, -1);
  group->exchange(kStream, std::vector<Message>{{of(own), 0}}, std::vector<Message>{{of(message), 2}});
  CHECK(message == std::vector<float>{1, 2, 3, 1});
  group->exchange(kStream, {}, std::vector<Message>{{of(message), 0}});
  group->broadcast(kStream, of(message), 0);
  group->receive(kStream, of(message), 2);
  CHECK(message == std::vector<float>{1, 2, 3, 1});
  CHECK(all_reduce_value(*group, 2.5, ReduceOp::kSum) == 2.5);
}

TEST_CASE("a fake communicator checks what it is given, moves nothing on meta and cannot split") {
  const auto group = make_fake_communicator(0, 2, "data");
  const Tensor part(nullptr, DType::kF32, DeviceType::kMeta, {3}), whole(nullptr, DType::kF32, DeviceType::kMeta, {6});
  group->all_gather(Stream(DeviceType::kMeta), part, whole, equal_counts(2, 3));
  CHECK_THROWS_AS(group->all_gather(Stream(DeviceType::kMeta), part, whole, equal_counts(2, 2)), Error);
  CHECK_THROWS_AS(group->send(Stream(DeviceType::kMeta), part, 2), Error);
  CHECK_THROWS_AS(group->split(0, 0, "part"), Error);
  CHECK_THROWS_AS(make_fake_communicator(2, 2, "data"), Error);
}

}  // namespace invar
