#include "support/communicator_suite.h"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <deque>
#include <limits>
#include <numeric>

#include "core/philox.h"
#include "support/guarded_buffer.h"

namespace invar {
namespace {

const Stream kStream(DeviceType::kCpu);
constexpr int64_t kLarge = 100'003;
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};
constexpr const char* kOpNames[] = {"sum", "max", "min"};

template <class F>
void for_each_dtype(F f) {
  f(float{});
  f(BF16{});
  f(double{});
  f(int32_t{});
  f(int64_t{});
}

// k, for |k| <= 256, times a factor that T holds but a narrower type does not: a reduction that goes through the wrong
// type shows. Sums of up to 256 are exact in every T.
template <class T>
T scaled(int64_t k) {
  if constexpr (std::same_as<T, BF16>) {
    return BF16(static_cast<float>(k));
  } else if constexpr (std::same_as<T, float>) {
    return static_cast<float>(k) * (1.0f + 0x1p-12f);
  } else if constexpr (std::same_as<T, double>) {
    return static_cast<double>(k) * (1.0 + 0x1p-40);
  } else if constexpr (std::same_as<T, int32_t>) {
    return static_cast<int32_t>(k * ((1 << 20) + 1));
  } else {
    return k * ((int64_t{1} << 54) + 1);
  }
}

// Term of `rank` in a reduction: (rank + 1) * u(i), where u(i) is in -4 .. 4.
int64_t unit(int64_t i) {
  return i % 9 - 4;
}
template <class T>
T term(int rank, int64_t i) {
  return scaled<T>((rank + 1) * unit(i));
}
template <class T>
T reduced(ReduceOp op, int size, int64_t i) {
  const int64_t u = unit(i);
  if (op == ReduceOp::kSum) return scaled<T>(size * (size + 1) / 2 * u);
  return scaled<T>((op == ReduceOp::kMax) == (u > 0) ? size * u : u);
}

// Content that says where it comes from and where it belongs.
template <class T>
T token(int64_t from, int64_t to, int64_t i) {
  return scaled<T>((from * 37 + to * 101 + i * 11) % 251);
}

template <class T>
std::string shown(T value) {
  if constexpr (std::same_as<T, BF16>) {
    return format("{}", static_cast<float>(value));
  } else {
    return format("{}", value);
  }
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// All elements are bit for bit value(i), and nothing was written beside them.
template <class T, class F>
void compare(Findings& findings, const std::string& what, const GuardedBuffer<T>& buffer, F value) {
  findings.expect(buffer.guards_intact(), what + ": wrote outside of the tensor");
  for (int64_t i = 0; i < buffer.count(); ++i) {
    const T expected = value(i);
    if (same_bits(buffer.data()[i], expected)) continue;
    findings.expect(false, format("{} {}: element {} of {} is {}, expected {}", what, name_of(DTypeOf<T>::value), i,
                                  buffer.count(), shown(buffer.data()[i]), shown(expected)));
    return;
  }
}

// Counts per rank: equal, unequal, none for some, all for the last, none at all.
std::vector<std::vector<int64_t>> count_patterns(int size, int64_t count) {
  std::vector<std::vector<int64_t>> patterns(5, std::vector<int64_t>(static_cast<size_t>(size), 0));
  for (size_t r = 0; r < static_cast<size_t>(size); ++r) {
    patterns[0][r] = count;
    patterns[1][r] = count / static_cast<int64_t>(r + 1);
    patterns[2][r] = r % 2 == 1 ? count : 0;
  }
  patterns[3].back() = count;
  return patterns;
}

int64_t total_of(const std::vector<int64_t>& counts) {
  return std::reduce(counts.begin(), counts.end());
}
int64_t begin_of(const std::vector<int64_t>& counts, int rank) {
  return std::reduce(counts.begin(), counts.begin() + rank);
}

// f(T{}, counts, in_place) for every dtype, size and pattern.
template <class F>
void for_each_layout(Communicator& world, F f) {
  for_each_dtype([&]<class T>(T type) {
    for (const int64_t count : {int64_t{1}, int64_t{17}, kLarge / world.size()}) {
      for (const auto& counts : count_patterns(world.size(), count)) {
        for (const bool in_place : {false, true}) f(type, counts, in_place);
      }
    }
  });
}

void all_reduce_case(Communicator& world, Findings& findings) {
  for_each_dtype([&]<class T>(T) {
    for (const ReduceOp op : kOps) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{17}, kLarge}) {
        GuardedBuffer<T> buffer(count, [&](int64_t i) { return term<T>(world.rank(), i); });
        world.all_reduce(kStream, buffer.tensor(), op);
        compare(findings, format("all_reduce {}", kOpNames[static_cast<size_t>(op)]), buffer,
                [&](int64_t i) { return reduced<T>(op, world.size(), i); });
      }
    }
  });
}

// Two ranks decide, the others add zero: whatever the order, there is one rounding.
void bf16_rounding_case(Communicator& world, Findings& findings) {
  if (world.size() < 2) return;
  const struct {
    float first, second, sum;
  } kSums[] = {
      {1.0f, 0x1p-8f, 1.0f},                         // halfway, down to even
      {1.0f + 0x1p-7f, 0x1p-8f, 1.0f + 0x1p-6f},     // halfway, up to even
      {1.0f, 0x1p-8f + 0x1p-15f, 1.0f + 0x1p-7f},    // just above halfway
      {-1.0f - 0x1p-7f, -0x1p-8f, -1.0f - 0x1p-6f},  // to even, not towards plus infinity
      {256.0f, 1.0f, 256.0f},                        // halfway, down to even: one is lost
      {0x1.fep127f, 0x1p120f, std::numeric_limits<float>::infinity()},
  };
  constexpr int64_t kCount = std::ssize(kSums);
  GuardedBuffer<BF16> buffer(kCount, [&](int64_t i) {
    const auto& sum = kSums[i];
    return BF16(world.rank() == 0 ? sum.first : world.rank() == world.size() - 1 ? sum.second : 0.0f);
  });
  world.all_reduce(kStream, buffer.tensor(), ReduceOp::kSum);
  compare(findings, "all_reduce rounding", buffer, [&](int64_t i) { return BF16(kSums[i].sum); });
}

template <class T>
double as_double(T value) {
  if constexpr (std::same_as<T, BF16>) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

// A NaN of any one rank is seen by all, wherever it meets the other terms.
void not_a_number_case(Communicator& world, Findings& findings) {
  const auto run = [&]<class T>(T) {
    for (const ReduceOp op : kOps) {
      if (op != ReduceOp::kSum && !world.adds_in_rank_order()) continue;  // see Communicator
      const int64_t count = world.size();
      GuardedBuffer<T> buffer(count, [&](int64_t i) {
        return i == world.rank() ? T(std::numeric_limits<float>::quiet_NaN()) : term<T>(world.rank(), i);
      });
      world.all_reduce(kStream, buffer.tensor(), op);
      for (int64_t i = 0; i < count; ++i) {
        findings.expect(std::isnan(as_double(buffer.data()[i])),
                        format("{} {}: the NaN of rank {} is lost", kOpNames[static_cast<size_t>(op)],
                               name_of(DTypeOf<T>::value), i));
      }
    }
  };
  run(float{});
  run(BF16{});
  run(double{});
}

// Sums that depend on their order: close to the exact one, and the same bits on all ranks.
void same_bits_case(Communicator& world, Findings& findings) {
  const auto run = [&]<class T>(T, double tolerance) {
    for (const int64_t count : {int64_t{1}, int64_t{17}, kLarge}) {
      const auto value = [&](int rank, int64_t i) { return T(1.0f / static_cast<float>(i % 97 + 3 * rank + 3)); };
      GuardedBuffer<T> sum(count, [&](int64_t i) { return value(world.rank(), i); });
      world.all_reduce(kStream, sum.tensor(), ReduceOp::kSum);
      GuardedBuffer<T> all(count * world.size());
      world.all_gather(kStream, sum.tensor(), all.tensor(), equal_counts(world.size(), count));
      compare(findings, "bits of a sum on all ranks", all, [&](int64_t i) { return sum.data()[i % count]; });
      for (int64_t i = 0; i < std::min<int64_t>(count, 97); ++i) {
        double exact = 0;
        for (int rank = 0; rank < world.size(); ++rank) exact += as_double(value(rank, i));
        findings.expect(std::abs(as_double(sum.data()[i]) - exact) <= tolerance * exact * world.size(),
                        format("sum {} of {}, expected {}", i, shown(sum.data()[i]), exact));
      }
    }
  };
  run(float{}, 0x1p-24);
  run(BF16{}, 0x1p-8);
  run(double{}, 0x1p-53);
}

// A term whose magnitude is anything between 2^-12 and 2^12: nearly every order of a sum gives other bits.
template <class T>
T wide_term(int rank, int64_t i) {
  const Philox random(7, RandomPurpose::kWeights, static_cast<uint64_t>(rank));
  const auto words = random.block(static_cast<uint64_t>(i));
  const double mantissa = 1.0 + words[0] * 0x1p-32;
  const double value = std::ldexp(words[2] % 2 == 0 ? mantissa : -mantissa, static_cast<int>(words[1] % 25) - 12);
  if constexpr (std::same_as<T, BF16>) {
    return BF16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Element i of the sum, added in ascending rank order.
template <class T>
T ascending_sum(int size, int64_t i) {
  T sum = wide_term<T>(0, i);
  for (int rank = 1; rank < size; ++rank) {
    if constexpr (std::same_as<T, BF16>) {
      sum = BF16(static_cast<float>(sum) + static_cast<float>(wide_term<T>(rank, i)));
    } else {
      sum += wide_term<T>(rank, i);
    }
  }
  return sum;
}

// Sums follow the ranks whatever the operation, the sizes and how the counts are cut. The lengths lie on both sides of
// what an implementation may send or add at once.
void order_of_sums_case(Communicator& world, Findings& findings) {
  if (!world.adds_in_rank_order()) return;
  const auto run = [&]<class T>(T) {
    const auto term = [&](int64_t i) { return wide_term<T>(world.rank(), i); };
    for (const int64_t count : {1, 1000, 1025, 5000, 40'000}) {
      GuardedBuffer<T> buffer(count, term);
      world.all_reduce(kStream, buffer.tensor(), ReduceOp::kSum);
      compare(findings, "order of all_reduce", buffer, [&](int64_t i) { return ascending_sum<T>(world.size(), i); });
    }
    for (const auto& counts : count_patterns(world.size(), 12'345)) {
      const int64_t begin = begin_of(counts, world.rank());
      GuardedBuffer<T> send(total_of(counts), term);
      GuardedBuffer<T> receive(counts[static_cast<size_t>(world.rank())]);
      world.reduce_scatter(kStream, send.tensor(), receive.tensor(), counts, ReduceOp::kSum);
      compare(findings, "order of reduce_scatter", receive,
              [&](int64_t i) { return ascending_sum<T>(world.size(), begin + i); });
    }
  };
  run(float{});
  run(BF16{});
  run(double{});
}

void all_gather_case(Communicator& world, Findings& findings) {
  for_each_layout(world, [&]<class T>(T, const std::vector<int64_t>& counts, bool in_place) {
    const int64_t begin = begin_of(counts, world.rank());
    const int64_t own = counts[static_cast<size_t>(world.rank())];
    GuardedBuffer<T> send(own, [&](int64_t i) { return token<T>(world.rank(), 0, i); });
    GuardedBuffer<T> receive(total_of(counts));
    if (in_place) std::copy_n(send.data(), own, receive.data() + begin);
    world.all_gather(kStream, in_place ? receive.part(begin, own) : send.tensor(), receive.tensor(), counts);
    int rank = 0;
    compare(findings, in_place ? "all_gather in place" : "all_gather", receive, [&](int64_t i) {
      while (i >= begin_of(counts, rank + 1)) ++rank;
      return token<T>(rank, 0, i - begin_of(counts, rank));
    });
    compare(findings, "all_gather's send", send, [&](int64_t i) { return token<T>(world.rank(), 0, i); });
  });
}

void reduce_scatter_case(Communicator& world, Findings& findings) {
  for_each_layout(world, [&]<class T>(T, const std::vector<int64_t>& counts, bool in_place) {
    for (const ReduceOp op : kOps) {
      const int64_t begin = begin_of(counts, world.rank());
      const int64_t own = counts[static_cast<size_t>(world.rank())];
      GuardedBuffer<T> send(total_of(counts), [&](int64_t i) { return term<T>(world.rank(), i); });
      GuardedBuffer<T> receive(own);
      world.reduce_scatter(kStream, send.tensor(), in_place ? send.part(begin, own) : receive.tensor(), counts, op);
      findings.expect(send.guards_intact(), "reduce_scatter: wrote outside of send");
      if (in_place) {
        std::copy_n(send.data() + begin, own, receive.data());
      } else {
        compare(findings, "reduce_scatter's send", send, [&](int64_t i) { return term<T>(world.rank(), i); });
      }
      compare(findings, format("reduce_scatter {}{}", kOpNames[static_cast<size_t>(op)], in_place ? " in place" : ""),
              receive, [&](int64_t i) { return reduced<T>(op, world.size(), begin + i); });
    }
  });
}

// Rank `from` sends (from * 3 + to * 5) % 7 * step elements to `to`: zeros for some, and not symmetric.
void all_to_all_case(Communicator& world, Findings& findings) {
  for_each_dtype([&]<class T>(T) {
    for (const int64_t step : {int64_t{0}, int64_t{1}, int64_t{17}, kLarge / 16}) {
      const auto amount = [&](int from, int to) { return int64_t{(from * 3 + to * 5) % 7} * step; };
      std::vector<int64_t> send_counts, receive_counts;
      for (int peer = 0; peer < world.size(); ++peer) {
        send_counts.push_back(amount(world.rank(), peer));
        receive_counts.push_back(amount(peer, world.rank()));
      }
      int to = 0;
      const auto sent = [&](int64_t i) {
        if (i == 0) to = 0;
        while (i >= begin_of(send_counts, to + 1)) ++to;
        return token<T>(world.rank(), to, i - begin_of(send_counts, to));
      };
      GuardedBuffer<T> send(total_of(send_counts), sent);
      GuardedBuffer<T> receive(total_of(receive_counts));
      world.all_to_all(kStream, send.tensor(), send_counts, receive.tensor(), receive_counts);
      int from = 0;
      compare(findings, "all_to_all", receive, [&](int64_t i) {
        while (i >= begin_of(receive_counts, from + 1)) ++from;
        return token<T>(from, world.rank(), i - begin_of(receive_counts, from));
      });
      compare(findings, "all_to_all's send", send, sent);
    }
  });
}

// Rank `from` sends (from + 2 * to + 1) % 4 messages to `to`, of growing sizes, an empty one first.
void exchange_case(Communicator& world, Findings& findings) {
  for_each_dtype([&]<class T>(T) {
    for (const int64_t step : {int64_t{1}, int64_t{17}, kLarge / 16}) {
      const auto messages = [](int from, int to) { return from == to ? 0 : (from + 2 * to + 1) % 4; };
      std::deque<GuardedBuffer<T>> buffers;
      std::vector<Message> sends, receives;
      for (int peer = 0; peer < world.size(); ++peer) {
        for (int i = 0; i < messages(world.rank(), peer); ++i) {
          buffers.emplace_back(i * step, [&](int64_t at) { return token<T>(world.rank(), peer + i, at); });
          sends.push_back({buffers.back().tensor(), peer});
        }
        for (int i = 0; i < messages(peer, world.rank()); ++i) {
          buffers.emplace_back(i * step);
          receives.push_back({buffers.back().tensor(), peer});
        }
      }
      world.exchange(kStream, sends, receives);
      auto buffer = buffers.begin();
      for (int peer = 0; peer < world.size(); ++peer) {
        for (int i = 0; i < messages(world.rank(), peer); ++i, ++buffer) {
          compare(findings, "exchange's send", *buffer,
                  [&](int64_t at) { return token<T>(world.rank(), peer + i, at); });
        }
        for (int i = 0; i < messages(peer, world.rank()); ++i, ++buffer) {
          compare(findings, "exchange", *buffer, [&](int64_t at) { return token<T>(peer, world.rank() + i, at); });
        }
      }
    }
  });
}

void broadcast_case(Communicator& world, Findings& findings) {
  for_each_dtype([&]<class T>(T) {
    for (int root = 0; root < world.size(); ++root) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{17}, kLarge}) {
        GuardedBuffer<T> buffer(count, [&](int64_t i) { return token<T>(world.rank(), 0, i); });
        world.broadcast(kStream, buffer.tensor(), root);
        compare(findings, format("broadcast from {}", root), buffer, [&](int64_t i) { return token<T>(root, 0, i); });
      }
    }
  });
}

// Every ordered pair in turn; two messages each, which must arrive in the order sent.
void point_to_point_case(Communicator& world, Findings& findings) {
  for_each_dtype([&]<class T>(T) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{17}, kLarge / 4}) {
      for (int from = 0; from < world.size(); ++from) {
        for (int to = 0; to < world.size(); ++to) {
          for (const int message : {0, 1}) {
            const auto value = [&](int64_t i) { return token<T>(from, to, i + 7 * message); };
            if (from == to) continue;
            if (world.rank() == from) {
              GuardedBuffer<T> buffer(count, value);
              world.send(kStream, buffer.tensor(), to);
              compare(findings, "sent", buffer, value);
            } else if (world.rank() == to) {
              GuardedBuffer<T> buffer(count);
              world.receive(kStream, buffer.tensor(), from);
              compare(findings, format("message {} from {}", message, from), buffer, value);
            }
          }
        }
      }
    }
  });
}

void values_case(Communicator& world, Findings& findings) {
  const int64_t n = world.size();
  const int64_t big = int64_t{1} << 54;
  findings.expect(all_reduce_value(world, big + world.rank(), ReduceOp::kSum) == n * big + n * (n - 1) / 2, "int sum");
  findings.expect(all_reduce_value(world, big + world.rank(), ReduceOp::kMax) == big + n - 1, "int max");
  findings.expect(all_reduce_value(world, big + world.rank(), ReduceOp::kMin) == big, "int min");
  const double tiny = 0x1p-40;
  findings.expect(all_reduce_value(world, 1.0 + tiny, ReduceOp::kSum) == static_cast<double>(n) * (1.0 + tiny),
                  "double sum");
  findings.expect(all_reduce_value(world, world.rank() * tiny, ReduceOp::kMax) == static_cast<double>(n - 1) * tiny,
                  "double max");
}

}  // namespace

std::vector<SuiteCase> collective_cases() {
  return {{"all_reduce", all_reduce_case},
          {"bf16 rounding", bf16_rounding_case},
          {"not a number", not_a_number_case},
          {"same bits", same_bits_case},
          {"order of sums", order_of_sums_case},
          {"all_gather", all_gather_case},
          {"reduce_scatter", reduce_scatter_case},
          {"all_to_all", all_to_all_case},
          {"exchange", exchange_case},
          {"broadcast", broadcast_case},
          {"point to point", point_to_point_case},
          {"values", values_case}};
}

std::vector<SuiteCase> communicator_suite() {
  std::vector<SuiteCase> cases = collective_cases();
  const std::vector<SuiteCase> more = group_cases();
  cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

}  // namespace invar
