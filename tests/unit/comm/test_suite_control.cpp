// The suite must be able to fail: communicators that are wrong in one way each, and the case that has to notice.
#include <numeric>

#include "comm/self_communicator.h"
#include "support/catch.h"
#include "unit/comm/thread_suite.h"

namespace invar {
namespace {

enum class Fault {
  kNone,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllReduceOrder,      // adds in descending rank order
  kReduceScatterOrder,  // starts behind the rank that gets the sum, as a ring does
  kAllToAll,
  kExchange,
  kBroadcast,
  kReceive,
  kOverrun,         // one byte behind the tensor
  kSendTouched,     // an all_gather that spoils its send
  kSkippedBarrier,  // returns at once
  kKeyIgnored,      // split by color alone
  kNamelessGroup,
  kMetaUnchecked,
  kMisuseAllowed,  // swallows errors
};

// One bit wrong in the last element, on the last rank only.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(Communicator& inner, Fault fault)
      : Communicator(inner.rank(), inner.size(), inner.name()), inner_(inner), fault_(fault) {
    if (fault == Fault::kAllReduceOrder) reversed_ = inner.split(0, -inner.rank(), "reversed");
  }

  std::unique_ptr<Communicator> split(int color, int key, std::string name) override {
    return inner_.split(color, fault_ == Fault::kKeyIgnored ? 0 : key,
                        fault_ == Fault::kNamelessGroup ? "" : std::move(name));
  }
  void all_reduce(const Stream& stream, const Tensor& buffer, ReduceOp op) override {
    guarded(buffer, [&] { (reversed_ ? *reversed_ : inner_).all_reduce(stream, buffer, op); });
    spoil(Fault::kAllReduce, buffer);
  }
  void all_gather(const Stream& stream, const Tensor& send, const Tensor& receive,
                  std::span<const int64_t> counts) override {
    guarded(receive, [&] { inner_.all_gather(stream, send, receive, counts); });
    spoil(Fault::kAllGather, receive);
    spoil(Fault::kSendTouched, send);
    if (fault_ == Fault::kOverrun && !receive.is_meta()) ++static_cast<char*>(receive.raw())[receive.bytes()];
  }
  void reduce_scatter(const Stream& stream, const Tensor& send, const Tensor& receive, std::span<const int64_t> counts,
                      ReduceOp op) override {
    guarded(receive, [&] { inner_.reduce_scatter(stream, send, receive, counts, op); });
    spoil(Fault::kReduceScatter, receive);
    if (fault_ == Fault::kReduceScatterOrder && receive.dtype() == DType::kF32 && !receive.is_meta()) {
      add_as_a_ring(stream, send, receive, counts);
    }
  }
  void all_to_all(const Stream& stream, const Tensor& send, std::span<const int64_t> send_counts, const Tensor& receive,
                  std::span<const int64_t> receive_counts) override {
    guarded(receive, [&] { inner_.all_to_all(stream, send, send_counts, receive, receive_counts); });
    spoil(Fault::kAllToAll, receive);
  }
  void exchange(const Stream& stream, std::span<const Message> sends, std::span<const Message> receives) override {
    if (fault_ == Fault::kMisuseAllowed) {
      try {
        inner_.exchange(stream, sends, receives);
      } catch (const Error&) {
      }
      return;
    }
    inner_.exchange(stream, sends, receives);
    if (!receives.empty()) spoil(Fault::kExchange, receives.back().buffer);
  }
  void broadcast(const Stream& stream, const Tensor& buffer, int root) override {
    guarded(buffer, [&] { inner_.broadcast(stream, buffer, root); });
    spoil(Fault::kBroadcast, buffer);
  }
  void send(const Stream& stream, const Tensor& buffer, int to) override {
    guarded(buffer, [&] { inner_.send(stream, buffer, to); });
  }
  void receive(const Stream& stream, const Tensor& buffer, int from) override {
    guarded(buffer, [&] { inner_.receive(stream, buffer, from); });
    spoil(Fault::kReceive, buffer);
  }
  void barrier() override {
    if (fault_ != Fault::kSkippedBarrier) inner_.barrier();
  }

 private:
  template <class F>
  void guarded(const Tensor& tensor, F call) const {
    if (fault_ == Fault::kMetaUnchecked && tensor.is_meta()) return;
    try {
      call();
    } catch (const Error&) {
      if (fault_ != Fault::kMisuseAllowed) throw;
    }
  }

  void add_as_a_ring(const Stream& stream, const Tensor& send, const Tensor& receive,
                     std::span<const int64_t> counts) const {
    const int64_t total = send.numel();
    std::vector<float> terms(static_cast<size_t>(size() * total));
    inner_.all_gather(stream, send, Tensor(terms.data(), DType::kF32, DeviceType::kCpu, {size() * total}),
                      equal_counts(size(), total));
    const int64_t begin = std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0});
    for (int64_t i = 0; i < receive.numel(); ++i) {
      float sum = 0;
      for (int step = 1; step <= size(); ++step) {
        sum += terms[static_cast<size_t>((rank() + step) % size() * total + begin + i)];
      }
      receive.data<float>()[i] = sum;
    }
  }

  void spoil(Fault fault, const Tensor& tensor) const {
    if (fault != fault_ || rank() + 1 != size() || tensor.is_meta() || tensor.empty()) return;
    static_cast<char*>(tensor.raw())[tensor.bytes() - size_of(tensor.dtype())] ^= 1;
  }

  Communicator& inner_;
  std::unique_ptr<Communicator> reversed_;
  Fault fault_;
};

std::vector<std::string> findings_with(Fault fault, const SuiteCase& test) {
  std::unique_ptr<Communicator> wrapped[3];
  return thread_findings(3, test, [&](Communicator& world) -> Communicator& {
    auto& own = wrapped[world.rank()];
    own = std::make_unique<FaultyCommunicator>(world, fault);
    return *own;
  });
}

}  // namespace

TEST_CASE("the suite finds each fault") {
  const struct {
    Fault fault;
    std::string found_by;
  } kFaults[] = {{Fault::kAllReduce, "all_reduce"},
                 {Fault::kAllReduce, "bf16 rounding"},
                 {Fault::kAllReduce, "same bits"},
                 {Fault::kAllReduce, "values"},
                 {Fault::kAllGather, "all_gather"},
                 {Fault::kAllGather, "same bits"},
                 {Fault::kAllReduceOrder, "order of sums"},
                 {Fault::kReduceScatterOrder, "order of sums"},
                 {Fault::kReduceScatter, "reduce_scatter"},
                 {Fault::kAllToAll, "all_to_all"},
                 {Fault::kBroadcast, "broadcast"},
                 {Fault::kReceive, "point to point"},
                 {Fault::kExchange, "exchange"},
                 {Fault::kOverrun, "all_gather"},
                 {Fault::kSendTouched, "all_gather"},
                 {Fault::kSkippedBarrier, "barrier"},
                 {Fault::kKeyIgnored, "split"},
                 {Fault::kKeyIgnored, "nested split"},
                 {Fault::kNamelessGroup, "split"},
                 {Fault::kMetaUnchecked, "meta"},
                 {Fault::kMisuseAllowed, "misuse"}};
  for (const SuiteCase& test : communicator_suite()) {
    INFO(test.name);
    CHECK(findings_with(Fault::kNone, test) == std::vector<std::string>{});
    for (const auto& [fault, found_by] : kFaults) {
      if (found_by != test.name) continue;
      INFO("fault " << static_cast<int>(fault));
      CHECK(!findings_with(fault, test).empty());
    }
  }
}

}  // namespace invar
