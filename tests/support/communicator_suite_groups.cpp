#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "support/communicator_suite.h"
#include "support/guarded_buffer.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kCpu);

// The world ranks of the group's members, by group rank.
std::vector<int64_t> members_of(Communicator& group, int world_rank) {
  int64_t own = world_rank;
  std::vector<int64_t> all(static_cast<size_t>(group.size()));
  group.all_gather(kStream, Tensor(&own, DType::kI64, DeviceType::kCpu, {1}),
                   Tensor(all.data(), DType::kI64, DeviceType::kCpu, {group.size()}), equal_counts(group.size(), 1));
  return all;
}

void expect_members(Findings& findings, const std::string& what, Communicator& group, const Communicator& world,
                    const std::vector<int64_t>& expected) {
  findings.expect(group.size() == std::ssize(expected), format("{}: size {}", what, group.size()));
  const std::vector<int64_t> members = members_of(group, world.rank());
  findings.expect(members == expected, what + ": other members or another order");
  findings.expect(members[static_cast<size_t>(group.rank())] == world.rank(), what + ": not at its own rank");
  for (int rank = 0; rank < std::min(group.size(), static_cast<int>(expected.size())); ++rank) {
    const auto known_as = static_cast<int>(expected[static_cast<size_t>(rank)]);
    findings.expect(group.job_rank(rank) == world.job_rank(known_as), what + ": a rank has another one in the job");
  }
}

// Ranks below `size` that keep(rank), in order.
std::vector<int64_t> ranks_where(int size, const std::function<bool(int)>& keep) {
  std::vector<int64_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (keep(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void split_case(Communicator& world, Findings& findings) {
  const int rank = world.rank();
  const auto parity = world.split(rank % 2, rank, "parity");
  findings.expect(parity->name() == "parity", "name of a group");
  expect_members(findings, "by parity", *parity, world,
                 ranks_where(world.size(), [&](int r) { return r % 2 == rank % 2; }));

  std::vector<int64_t> all = ranks_where(world.size(), [](int) { return true; });
  const auto equal_keys = world.split(7, 0, "equal keys");
  expect_members(findings, "equal keys keep the order", *equal_keys, world, all);
  std::reverse(all.begin(), all.end());
  const auto reversed = world.split(0, -rank, "reversed");
  expect_members(findings, "reversed keys", *reversed, world, all);

  const auto rest = world.split(rank == 0 ? -1 : 0, rank, "rest");
  findings.expect((rest == nullptr) == (rank == 0), "a negative color gives no group");
  if (rest) expect_members(findings, "rest", *rest, world, ranks_where(world.size(), [](int r) { return r > 0; }));

  // Groups and their parent in turn, all alive.
  const int64_t parity_sum = all_reduce_value(*parity, int64_t{1}, ReduceOp::kSum);
  const int64_t world_sum = all_reduce_value(world, parity_sum, ReduceOp::kSum);
  int64_t squares = 0;
  for (const int p : {0, 1}) {
    const int64_t n = (world.size() + 1 - p) / 2;
    squares += n * n;
  }
  findings.expect(world_sum == squares, "sum over the groups' sums");
}

// Halves of halves, with the order reversed at each turn.
void nested_split_case(Communicator& world, Findings& findings) {
  const auto half = world.split(world.rank() / 2, -world.rank(), "half");
  const int64_t first = world.rank() / 2 * 2;
  const bool whole = first + 1 < world.size();
  expect_members(findings, "half", *half, world,
                 whole ? std::vector<int64_t>{first + 1, first} : std::vector<int64_t>{first});
  const auto back = half->split(0, -half->rank(), "back");
  expect_members(findings, "back", *back, world,
                 whole ? std::vector<int64_t>{first, first + 1} : std::vector<int64_t>{first});
  const auto single = back->split(back->rank(), 0, "single");
  expect_members(findings, "single", *single, world, {world.rank()});
  const auto none = single->split(-1, 0, "none");
  findings.expect(none == nullptr, "a negative color in a group of one");
}

// steady_clock is one clock for all processes of a host.
void barrier_case(Communicator& world, Findings& findings) {
  const auto now = [] { return int64_t{std::chrono::steady_clock::now().time_since_epoch().count()}; };
  for (int late = 0; late < world.size(); ++late) {
    if (world.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const int64_t arrived = now();
    world.barrier();
    const int64_t left = now();
    const int64_t last_arrival = all_reduce_value(world, arrived, ReduceOp::kMax);
    findings.expect(left >= last_arrival, format("left the barrier before rank {} arrived", late));
  }
}

Tensor meta(DType dtype, int64_t count) {
  return Tensor(nullptr, dtype, DeviceType::kMeta, {count});
}

void expect_error(Findings& findings, const std::string& what, const std::string& operation,
                  const std::function<void()>& call) {
  try {
    call();
    findings.expect(false, what + ": not refused");
  } catch (const Error& error) {
    const std::string text = error.what();
    findings.expect(error.kind() == ErrorKind::kFault, what + ": not a fault");
    findings.expect(text.find(operation) != std::string::npos && text.find("group '") != std::string::npos,
                    what + ": message without operation and group: " + text);
  }
}

// Rank 0 calls alone: had anything to move, it would wait. The checks are made all the same.
void meta_case(Communicator& world, Findings& findings) {
  if (world.rank() == 0) {
    const int n = world.size();
    const auto counts = equal_counts(n, 3);
    world.all_reduce(kStream, meta(DType::kBF16, 5), ReduceOp::kSum);
    world.all_gather(kStream, meta(DType::kF32, 3), meta(DType::kF32, 3 * n), counts);
    world.reduce_scatter(kStream, meta(DType::kF32, 3 * n), meta(DType::kF32, 3), counts, ReduceOp::kMax);
    world.all_to_all(kStream, meta(DType::kI32, 3 * n), counts, meta(DType::kI32, 3 * n), counts);
    world.broadcast(kStream, meta(DType::kF64, 5), 0);
    if (n > 1) {
      world.send(kStream, meta(DType::kI64, 5), 1);
      world.receive(kStream, meta(DType::kI64, 5), 1);
    }
    expect_error(findings, "meta all_gather", "all_gather",
                 [&] { world.all_gather(kStream, meta(DType::kF32, 3), meta(DType::kF32, 3 * n + 1), counts); });
    expect_error(findings, "meta reduce_scatter", "reduce_scatter", [&] {
      world.reduce_scatter(kStream, meta(DType::kF32, 3 * n), meta(DType::kBF16, 3), counts, ReduceOp::kSum);
    });
    expect_error(findings, "meta all_to_all", "all_to_all", [&] {
      world.all_to_all(kStream, meta(DType::kI32, 3 * n + 1), counts, meta(DType::kI32, 3 * n), counts);
    });
    expect_error(findings, "meta broadcast", "broadcast", [&] { world.broadcast(kStream, meta(DType::kF64, 5), n); });
    expect_error(findings, "meta send", "send", [&] { world.send(kStream, meta(DType::kF64, 5), n); });
    expect_error(findings, "meta receive", "receive", [&] { world.receive(kStream, meta(DType::kF64, 5), 0); });
  }
  world.barrier();
}

void gather_misuse_case(Communicator& world, Findings& findings) {
  const int n = world.size();
  const int64_t own = 4 * world.rank();
  GuardedBuffer<float> send(4), whole(4 * n);
  GuardedBuffer<BF16> narrow(4), narrow_whole(4 * n);
  const auto four = equal_counts(n, 4);
  auto negative = four;
  negative[0] = -1;
  const auto refused = [&](const std::string& what, const Tensor& part, const Tensor& all,
                           const std::vector<int64_t>& counts) {
    expect_error(findings, "all_gather, " + what, "all_gather", [&] { world.all_gather(kStream, part, all, counts); });
    expect_error(findings, "reduce_scatter, " + what, "reduce_scatter",
                 [&] { world.reduce_scatter(kStream, all, part, counts, ReduceOp::kSum); });
  };
  refused("counts for another size", send.tensor(), whole.tensor(), equal_counts(n + 1, 4));
  refused("counts that do not add up", send.tensor(), whole.tensor(), equal_counts(n, 3));
  refused("a negative count", send.tensor(), whole.tensor(), negative);
  refused("another size than the count", send.part(0, 3), whole.tensor(), four);
  refused("two dtypes, part", narrow.tensor(), whole.tensor(), four);
  refused("two dtypes, whole", send.tensor(), narrow_whole.tensor(), four);
  refused("two devices", meta(DType::kF32, 4), whole.tensor(), four);
  refused("no memory", Tensor(nullptr, DType::kF32, DeviceType::kCpu, {4}), whole.tensor(), four);
  refused("a shifted place", whole.part(own + 1, 4), whole.tensor(), four);
  refused("device memory", Tensor(send.data(), DType::kF32, DeviceType::kCuda, {4}),
          Tensor(whole.data(), DType::kF32, DeviceType::kCuda, {4 * n}), four);
}

// Each rank makes the same wrong call; none may wait. The group works afterwards.
void misuse_case(Communicator& world, Findings& findings) {
  const int n = world.size();
  gather_misuse_case(world, findings);

  GuardedBuffer<float> send(2 * n), receive(2 * n);
  const auto two = equal_counts(n, 2);
  auto lopsided = two;
  lopsided[static_cast<size_t>(world.rank())] = 1;
  const auto exchange = [&](const std::string& what, const Tensor& from, const std::vector<int64_t>& send_counts,
                            const Tensor& to, const std::vector<int64_t>& receive_counts) {
    expect_error(findings, "all_to_all, " + what, "all_to_all",
                 [&] { world.all_to_all(kStream, from, send_counts, to, receive_counts); });
  };
  exchange("send counts", send.tensor(), equal_counts(n, 1), receive.tensor(), two);
  exchange("receive counts", send.tensor(), two, receive.tensor(), equal_counts(n, 3));
  exchange("to itself", send.part(0, 2 * n - 1), lopsided, receive.tensor(), two);
  exchange("overlap", send.tensor(), two, send.tensor(), two);

  const Tensor buffer = send.tensor();
  const Tensor on_device(send.data(), DType::kF32, DeviceType::kCuda, {2});
  const Tensor nothing(nullptr, DType::kF32, DeviceType::kCpu, {2});
  expect_error(findings, "root beyond the end", "broadcast", [&] { world.broadcast(kStream, buffer, n); });
  expect_error(findings, "negative root", "broadcast", [&] { world.broadcast(kStream, buffer, -1); });
  expect_error(findings, "broadcast on device", "broadcast", [&] { world.broadcast(kStream, on_device, 0); });
  expect_error(findings, "broadcast of nothing", "broadcast", [&] { world.broadcast(kStream, nothing, 0); });
  expect_error(findings, "all_reduce on device", "all_reduce",
               [&] { world.all_reduce(kStream, on_device, ReduceOp::kSum); });
  expect_error(findings, "all_reduce of nothing", "all_reduce",
               [&] { world.all_reduce(kStream, nothing, ReduceOp::kSum); });
  expect_error(findings, "send to itself", "send", [&] { world.send(kStream, buffer, world.rank()); });
  expect_error(findings, "send beyond the end", "send", [&] { world.send(kStream, buffer, n); });
  expect_error(findings, "receive from itself", "receive", [&] { world.receive(kStream, buffer, world.rank()); });
  findings.expect(all_reduce_value(world, int64_t{1}, ReduceOp::kSum) == n, "the group after refused calls");
}

}  // namespace

std::vector<SuiteCase> group_cases() {
  return {{"split", split_case},
          {"nested split", nested_split_case},
          {"barrier", barrier_case},
          {"meta", meta_case},
          {"misuse", misuse_case}};
}

}  // namespace invar
