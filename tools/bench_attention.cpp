// bench_attention [sequence] [threads]: a sliding attention layer beside a full one of equal sizes, forward and
// backward, projections included and alone. The floor of the sliding one is its share of the visible pairs.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "comm/self_communicator.h"
#include "core/error.h"
#include "core/format.h"
#include "layers/self_attention.h"
#include "ops/elementwise.h"

namespace {

using namespace invar;

constexpr int64_t kHidden = 512;
constexpr int64_t kQueryHeads = 8;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 256;

double fastest_of(int runs, const std::function<void()>& run) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

struct Times {
  double forward = 0;
  double backward = 0;
};

// One SelfAttention layer on one rank, with random weights and inputs.
class Bench {
 public:
  Bench(int64_t sequence, int64_t window, int threads)
      : stream_(DeviceType::kCpu, threads),
        world_(make_self_communicator()),
        groups_(make_process_groups(*world_, {1, 1})),
        replicas_(groups_),
        region_(*groups_.tensor, false),
        memory_("bench", DeviceType::kCpu, int64_t{1} << 30),
        scratch_("scratch", DeviceType::kCpu, int64_t{1} << 30) {
    region_.set_tokens(sequence);
    rope_.cos = memory_.allocate("cos", DType::kF32, {sequence, kHeadDim / 2});
    rope_.sin = memory_.allocate("sin", DType::kF32, {sequence, kHeadDim / 2});
    ops::fill_rope_table(stream_, rope_, 1e4, kHeadDim, kHeadDim / 2);
    AttentionSpec spec;
    spec.prefix = "bench.";
    spec.hidden_size = kHidden;
    spec.query_heads = kQueryHeads;
    spec.kv_heads = kKvHeads;
    spec.head_dim = kHeadDim;
    spec.scale = 0.0625;
    spec.window = window;
    spec.normed_values = true;
    layer_ = std::make_unique<SelfAttention>(LayerSetup{table_, replicas_, *sums_}, spec, rope_);
    table_.allocate(memory_, memory_, DType::kF32);
    initialise(table_, stream_, 1, 0.02);
    ops::zero(stream_, table_.flat_gradients());
    x_ = memory_.allocate("x", DType::kF32, {sequence, kHidden});
    for (int64_t i = 0; i < x_.numel(); ++i) x_.data<float>()[i] = static_cast<float>(i % 97) / 97.0f - 0.5f;
  }

  // Scores, probabilities and products alone, on heads as the layer prepares them.
  Times attention_alone(int64_t window, int runs) {
    const ArenaScope scope(scratch_);
    const int64_t tokens = x_.dim(0);
    const auto heads = [&](int64_t count) {
      const Tensor buffer = scratch_.allocate("heads", DType::kF32, {tokens, count * kHeadDim});
      for (int64_t i = 0; i < buffer.numel(); ++i) buffer.data<float>()[i] = static_cast<float>(i % 89) / 89.0f - 0.5f;
      return ops::HeadView{buffer, kKvHeads, count / kKvHeads, kHeadDim, count / kKvHeads * kHeadDim, 0};
    };
    const auto q = heads(kQueryHeads), k = heads(kKvHeads), v = heads(kKvHeads), out = heads(kQueryHeads);
    const auto d_out = heads(kQueryHeads), d_q = heads(kQueryHeads), d_k = heads(kKvHeads), d_v = heads(kKvHeads);
    const Tensor lse = scratch_.allocate("lse", DType::kF32, {tokens, kQueryHeads});
    const Tensor delta = scratch_.allocate("delta", DType::kF32, {tokens, kQueryHeads});
    const ops::AttentionParams params{tokens, 0.0625f, window};
    const ops::AttentionBackend& attention = ops::choose_attention(DeviceType::kCpu, params, q, k);
    Times times;
    times.forward = fastest_of(runs, [&] { attention.forward(stream_, params, q, k, v, out, lse); });
    times.backward =
        fastest_of(runs, [&] { attention.backward(stream_, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v); });
    return times;
  }

  Times layer(int runs) {
    const LayerContext ctx{
        {stream_, region_, scratch_, DType::kF32, x_.dim(0)}, *sums_, weights_, *gradients_, memory_};
    SelfAttention::Saved saved;
    Times times;
    times.forward = fastest_of(runs, [&] {
      const ArenaScope kept(memory_);
      const ArenaScope scope(scratch_);
      layer_->forward(ctx, x_, nullptr, saved);
    });
    const ArenaScope kept(memory_);
    const ArenaScope scope(scratch_);
    const Tensor d_y = layer_->forward(ctx, x_, nullptr, saved);
    times.backward = fastest_of(runs, [&] {
      const ArenaScope inner(scratch_);
      layer_->backward(ctx, x_, nullptr, saved, d_y);
    });
    return times;
  }

 private:
  Stream stream_;
  std::unique_ptr<Communicator> world_;
  ProcessGroups groups_;
  ReplicaGroups replicas_;
  TensorRegion region_;
  Arena memory_;
  Arena scratch_;
  struct Unheard : GradientListener {
    void gradient_done(WeightId /*id*/) override {}
  };

  std::unique_ptr<SumPolicy> sums_ = fast_sums();
  ParameterTable table_;
  ResidentWeights weights_{table_};
  Unheard listener_;
  std::unique_ptr<GradientSink> gradients_ = sums_->gradients(table_, listener_);
  ops::RopeTable rope_;
  std::unique_ptr<SelfAttention> layer_;
  Tensor x_;
};

void print_table(const char* what, int64_t sequence, const std::function<Times(int64_t window)>& measure) {
  std::printf(
      "\n| %s | share of the pairs | forward, ms | of full | backward, ms | of full |\n|---|---|---|---|---|---|\n",
      what);
  Times full;
  for (const int64_t window : {int64_t{0}, sequence / 4, sequence / 8, sequence / 32}) {
    const Times times = measure(window);
    if (window == 0) full = times;
    const auto s = static_cast<double>(sequence);
    const double w = window == 0 ? s : static_cast<double>(window);
    std::printf("| %s | %.2f | %.0f | %.2f | %.0f | %.2f |\n",
                window == 0 ? "full" : format("window {}", window).c_str(), (w * s - w * w / 2) / (s * s / 2),
                times.forward * 1e3, times.forward / full.forward, times.backward * 1e3,
                times.backward / full.backward);
    std::fflush(stdout);
  }
}

void print_tables(int64_t sequence, int threads) {
  constexpr int kRuns = 3;
  std::printf("fp32, hidden %ld, %ld query and %ld KV heads of %ld, S = %ld, %d threads\n", kHidden, kQueryHeads,
              kKvHeads, kHeadDim, sequence, threads);
  print_table("attention alone", sequence,
              [&](int64_t window) { return Bench(sequence, window, threads).attention_alone(window, kRuns); });
  print_table("with its projections and norms", sequence,
              [&](int64_t window) { return Bench(sequence, window, threads).layer(kRuns); });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t sequence = argc > 1 ? std::atoll(argv[1]) : 4096;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  if (sequence < 32 || threads < 1) {
    std::fputs("usage: bench_attention [sequence of at least 32] [threads]\n", stderr);
    return 2;
  }
  try {
    print_tables(sequence, threads);
  } catch (const Error& error) {
    std::fprintf(stderr, "bench_attention: %s\n", error.what());
    return 1;
  }
  return 0;
}
