// numerics.reduction: invariant gives one state per step, to the bit, at every layout. The negative controls below show
// that this comparison notices one sum in another order.
#include <algorithm>
#include <cmath>
#include <span>
#include <tuple>
#include <utility>

#include "comm/self_communicator.h"
#include "config/contract.h"
#include "config/field.h"
#include "invariant_models.h"
#include "ops/matmul.h"
#include "parallel/invariant_gradients.h"
#include "parallel/logical_tensor.h"
#include "support/catch.h"
#include "support/wrapped_communicator.h"

using namespace invar;
using namespace invar::test;

namespace {

using MakeModel = Config (*)(Precision);
struct Model {
  const char* name;
  MakeModel make;
  int widest;  // tensor-parallel group
};
const std::vector<Model> kModels = {{"Qwen3, tied", tied_qwen3, 8},
                                    {"Qwen3, untied", untied_qwen3, 6},
                                    {"Gemma 4 with per-layer embeddings", gemma4_e_series, 8},
                                    {"Gemma 4, dense", gemma4_dense, 6},
                                    {"Qwen3, two KV heads", grouped_qwen3, 8},
                                    {"Qwen3, two KV heads, uneven runs", uneven_qwen3, 6},
                                    {"Gemma 4, two KV heads and one", grouped_gemma4, 8}};

constexpr std::array kRecomputeKinds = {RecomputeKind::kFull, RecomputeKind::kNone, RecomputeKind::kSelective};

std::string describe(const Layout& layout) {
  return format("tensor {}{}, data {}, micro-batch {}, recompute {}", layout.tensor,
                layout.sequence ? " with sequence parallelism" : "", layout.data, layout.micro_batch,
                word_of(layout.recompute));
}

// Every tensor-parallel group, with and without sequence parallelism.
std::vector<Layout> tensor_layouts(int widest) {
  std::vector<Layout> layouts = {{1, false}};
  for (const int tensor : {2, 3, 4, 6, 8}) {
    if (tensor > widest) continue;
    layouts.push_back({tensor, false});
    layouts.push_back({tensor, true});
  }
  return layouts;
}

// Data-parallel ranks and micro-batches of a batch of 12.
const std::vector<std::pair<int, int64_t>> kBatches = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2},
                                                       {2, 3}, {3, 1}, {3, 2}, {3, 4}, {4, 1}, {4, 3}};

// Every tensor-parallel layout and every cut of the batch at least once, paired differently in each turn;
// each kind of recomputation too.
std::vector<Layout> spanning_layouts(int widest, size_t turn) {
  const std::vector<Layout> tensor = tensor_layouts(widest);
  std::vector<Layout> layouts;
  for (size_t i = 0; i < kBatches.size(); ++i) {
    Layout layout = tensor[i % tensor.size()];
    std::tie(layout.data, layout.micro_batch) = kBatches[(5 * i + turn) % kBatches.size()];
    layout.recompute = kRecomputeKinds[(i / 2 + turn) % kRecomputeKinds.size()];
    layouts.push_back(layout);
  }
  return layouts;
}

std::vector<Layout> all_layouts(int widest) {
  std::vector<Layout> layouts;
  for (const Layout& tensor : tensor_layouts(widest)) {
    for (const auto& [data, micro_batch] : kBatches) {
      for (const RecomputeKind recompute : kRecomputeKinds) {
        layouts.push_back({tensor.tensor, tensor.sequence, data, micro_batch, recompute});
      }
    }
  }
  return layouts;
}

// The run on one rank, a sample at a time: every step moves all of the state, and is clipped.
HashedRun lively_run(const Config& config) {
  HashedRun run = train_hashed(config, {});
  REQUIRE(std::ssize(run.steps) == config.train.steps);
  for (const HashedStep& step : run.steps) CHECK(step.result.grad_norm > config.optimizer.clip_grad);
  for (size_t step = 1; step < run.steps.size(); ++step) {
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      CHECK(run.steps[step].digest.kinds[kind] != run.steps[step - 1].digest.kinds[kind]);
    }
  }
  return run;
}

// How many layouts were compared; all must have the bits of one rank, which `bits` receives.
size_t compare_layouts(const Config& config, const std::vector<Layout>& layouts,
                       std::vector<uint64_t>* bits = nullptr) {
  const std::vector<uint64_t> one = lively_run(config).bits();
  if (bits != nullptr) *bits = one;
  for (const Layout& layout : layouts) {
    INFO(describe(layout));
    CHECK(train_hashed(config, layout).bits() == one);
  }
  return layouts.size();
}

}  // namespace

TEST_CASE("every layout has the state of one rank after every step", "[.matrix]") {
  size_t compared = 0;
  size_t turn = 0;
  for (const Model& model : kModels) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      INFO(model.name << (precision == Precision::kF32 ? ", fp32" : ", bf16"));
      compared += compare_layouts(model.make(precision), spanning_layouts(model.widest, turn++));
    }
  }
  WARN(compared << " layouts compared with one rank, ten steps each");
}

TEST_CASE("workers of several samples: every layout has the state of one rank after every step") {
  size_t compared = 0;
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Config config = tied_qwen3(precision);
    config.numerics.workers = 4;
    compared += compare_layouts(config, {{1, false, 1, 4},
                                         {3, true, 1, 2},  // micro-batches that hold parts of two workers
                                         {2, true, 2, 2},
                                         {1, false, 2, 6},
                                         {2, false, 4, 1},
                                         {1, false, 4, 3, RecomputeKind::kFull}});
  }
  WARN(compared << " layouts compared with one rank, ten steps each");
}

// Of sibling workers on one rank, the second adds to the first one's sum at once; here each has a rank of its own.
TEST_CASE("a worker on every data rank: every layout has the state of one rank after every step") {
  for (const MakeModel make : {tied_qwen3, gemma4_e_series}) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      Config config = make(precision);
      config.data.mock_vocab_size = 9;  // so that tokens come several times in a sample
      compare_layouts(config, {{1, false, 12, 1}, {2, true, 6, 2}});
    }
  }
}

TEST_CASE("every cut of a batch that all of them divide: every layout has the state of one rank after every step") {
  const std::vector<std::pair<int, bool>> tensor = {{1, false}, {8, true}, {3, true}, {2, false}, {4, true}};
  size_t compared = 0;
  for (const MakeModel make : {tied_qwen3, gemma4_e_series}) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      Config config = make(precision);
      config.train.global_batch_size = 16;
      config.numerics.workers = 4;
      std::vector<Layout> layouts;
      for (const int data : {1, 2, 4}) {
        for (const int64_t micro_batch : {1, 2, 4}) {
          const auto& [ranks, sequence] = tensor[(layouts.size() + compared) % tensor.size()];
          layouts.push_back({ranks, sequence, data, micro_batch, kRecomputeKinds[layouts.size() % 3]});
        }
      }
      compared += compare_layouts(config, layouts);
    }
  }
  WARN(compared << " layouts compared with one rank, ten steps each");
}

TEST_CASE("samples of several documents: every layout has the state of one rank after every step") {
  size_t compared = 0;
  for (const MakeModel make : {tied_qwen3, gemma4_e_series}) {
    Config config = make(Precision::kBF16);
    config.train.steps = 4;
    config.data.eod_id = 3;
    config.data.eod_mask_loss = true;
    config.data.reset_at_eod = true;
    compared += compare_layouts(config, {{2, true, 2, 3}, {3, false, 1, 4}, {8, true, 1, 2}, {1, false, 4, 1}});
  }
  WARN(compared << " layouts compared with one rank, four steps each");
}

TEST_CASE("blocks of several tokens: every layout has the state of one rank after every step") {
  Config config = untied_qwen3(Precision::kBF16);
  config.train.steps = 3;
  config.train.sequence_length = 192;
  config.train.global_batch_size = 4;
  config.numerics.workers = 4;
  REQUIRE(token_block_of(config.train.sequence_length) == 3);
  const size_t compared =
      compare_layouts(config, {{2, true, 2, 1}, {3, true, 1, 1}, {6, true, 1, 4}, {4, false, 4, 1}});
  WARN(compared << " layouts compared with one rank, three steps each");
}

TEST_CASE("leaves rounded to bf16: every layout has the state of one rank after every step") {
  size_t compared = 0;
  const auto compare = [&](Config config, const std::vector<Layout>& layouts) {
    config.train.steps = 4;
    const std::vector<uint64_t> exact = train_hashed(config, {}).bits();
    config.numerics.tensor_reduce_dtype = Precision::kBF16;
    std::vector<uint64_t> rounded;
    compared += compare_layouts(config, layouts, &rounded);
    CHECK(rounded != exact);
  };
  // At 8 ranks a leaf each in most sums, at fewer sums of rounded ones.
  compare(tied_qwen3(Precision::kBF16),
          {{8, true, 1, 4}, {8, false, 1, 4}, {4, true, 2, 3}, {3, true, 1, 2}, {2, false, 1, 12}, {1, false, 4, 1}});
  compare(uneven_qwen3(Precision::kBF16), {{6, true, 1, 4}, {4, false, 1, 4}, {3, true, 2, 2}, {2, true, 1, 4}});
  compare(gemma4_e_series(Precision::kBF16), {{8, true, 1, 4}, {4, true, 1, 2}, {2, false, 2, 3}});
  compare(grouped_gemma4(Precision::kBF16), {{8, false, 1, 4}, {4, true, 1, 4}});
  WARN(compared << " layouts compared with one rank, four steps each");
}

TEST_CASE("leaves rounded to bf16 travel in half the bytes where each rank has one") {
  const auto sent = [](Config config, int tensor, Precision leaf, const char* what) {
    config.numerics.tensor_reduce_dtype = leaf;
    config.parallel.tensor = tensor;
    config.parallel.sequence = true;
    config.train.micro_batch_size = 1;
    TrafficTable traffic;
    measure_memory(config, {.tensor = tensor}, 0, DeviceType::kCpu, &traffic);
    return static_cast<double>(traffic.at(what).bytes);
  };
  const auto exchanged = [&](int tensor, Precision leaf) {
    return sent(tied_qwen3(Precision::kBF16), tensor, leaf, "tensor all_to_all");
  };
  CHECK(exchanged(4, Precision::kBF16) == exchanged(4, Precision::kF32));
  // The rest are sums of few numbers, of norms and of the loss.
  CHECK(exchanged(8, Precision::kBF16) < 0.6 * exchanged(8, Precision::kF32));
  // What runs of query heads add to the gradients of a KV head has been rounded in any case.
  const auto of_runs = [&](Precision precision) {
    return sent(grouped_qwen3(precision), 8, Precision::kF32, "kv replicas all_to_all");
  };
  CHECK(of_runs(Precision::kBF16) == 0.5 * of_runs(Precision::kF32));
}

TEST_CASE("the whole product of layouts", "[.full]") {
  size_t compared = 0;
  for (const Model& model : kModels) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      INFO(model.name << (precision == Precision::kF32 ? ", fp32" : ", bf16"));
      compared += compare_layouts(model.make(precision), all_layouts(model.widest));
    }
  }
  WARN(compared << " layouts compared with one rank, ten steps each");
}

namespace {

// Four ranks of one leaf or worker each: what a rank receives of a sum is a row of each rank.
using Rows = std::vector<std::span<float>>;
using TamperRows = void (*)(const Rows& rows);

void add_in_rank_order(const Rows& rows) {
  for (size_t i = 0; i < rows[0].size(); ++i) {
    float sum = rows[0][i];
    for (size_t row = 1; row < rows.size(); ++row) sum += std::exchange(rows[row][i], 0.0f);
    rows[0][i] = sum;
  }
}
void swap_siblings(const Rows& rows) {
  std::ranges::swap_ranges(rows[0], rows[1]);
}
void swap_others(const Rows& rows) {
  std::ranges::swap_ranges(rows[1], rows[2]);
}

Config control_run() {
  Config config = tied_qwen3(Precision::kF32);
  config.numerics.leaves = 4;
  config.numerics.workers = 4;
  config.train.steps = 1;
  return config;
}

using Bits = std::vector<uint64_t>;  // of a run

constexpr int64_t kEverySum = -1;

enum class Sums { kTensor, kCopies, kData };  // over which ranks; kCopies: of KV heads

// A run in which one sum of each rank, the number `which`, or every one is tampered with, and how many there were.
struct Tampered {
  Bits bits;
  int64_t sums = 0;
};
Tampered tampered_run(const Config& config, const Layout& layout, Sums sums, int64_t which, TamperRows tamper) {
  Tampered result;
  const HashedRun run = train_hashed(config, layout, [&](ProcessGroups& groups) {
    auto& group = sums == Sums::kData ? groups.holders : groups.tensor;
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(group));
    const bool counts = groups.world->rank() == 0;
    const auto after_exchange = [&result, which, tamper, counts, next = int64_t{0}](const Tensor& received) mutable {
      const int64_t number = next++;
      if (counts) result.sums = next;
      if (which != kEverySum && which != number) return;
      const std::span<float> all = received.span<float>();
      Rows rows;
      for (size_t row = 0; row < 4; ++row) rows.push_back(all.subspan(row * all.size() / 4, all.size() / 4));
      tamper(rows);
    };
    if (sums == Sums::kCopies) {
      wrapped->tamper_with_all_to_all_of_parts(after_exchange);
    } else {
      wrapped->tamper_with_all_to_all(after_exchange);
    }
    group = std::move(wrapped);
  });
  result.bits = run.bits();
  return result;
}

// Siblings may change places in all sums, but no sum may be in rank order or have two others swapped. Returns how many
// sums there were.
int64_t check_sums(const Config& config, const Layout& layout, Sums sums) {
  const Bits one = train_hashed(config, {}).bits();
  const Tampered same = tampered_run(config, layout, sums, kEverySum, swap_siblings);
  CHECK(same.bits == one);
  for (int64_t sum = 0; sum < same.sums; ++sum) {
    INFO(describe(layout) << ", sum " << sum << " of " << same.sums);
    CHECK(tampered_run(config, layout, sums, sum, add_in_rank_order).bits != one);
    CHECK(tampered_run(config, layout, sums, sum, swap_others).bits != one);
  }
  return same.sums;
}

const std::vector<Layout> kFourTensorRanks = {{4, false, 1, 12}, {4, true, 1, 12}};

// One KV head, whose four query heads are a leaf each.
template <class Make>
Config one_kv_head(Make make) {
  Config config = make(Precision::kF32);
  config.model.num_attention_heads = 4;
  config.model.num_key_value_heads = 1;
  config.model.num_global_key_value_heads = 0;
  config.model.attention_k_eq_v = false;
  config.numerics.leaves = 4;
  config.numerics.workers = 4;
  config.train.steps = 1;
  return config;
}

}  // namespace

TEST_CASE("control: a sum over tensor-parallel ranks has its order") {
  for (const Layout& layout : kFourTensorRanks) CHECK(check_sums(control_run(), layout, Sums::kTensor) > 8);
}

TEST_CASE("control: a sum over data-parallel ranks has its order") {
  CHECK(check_sums(control_run(), {1, false, 4, 3}, Sums::kData) > 8);
}

TEST_CASE("control: a sum over query heads has its order, and over what they add to the gradients of a KV head") {
  CHECK(check_sums(one_kv_head(tied_qwen3), kFourTensorRanks.back(), Sums::kTensor) > 8);
  for (const Config& config : {one_kv_head(tied_qwen3), one_kv_head(grouped_gemma4)}) {
    for (const Layout& layout : kFourTensorRanks) {
      CHECK(check_sums(config, layout, Sums::kCopies) == config.model.num_hidden_layers);
    }
  }
}

TEST_CASE("control: sums in any order depend on the layout") {
  Config config = control_run();
  config.numerics = {Precision::kF32};
  const Bits one = train_hashed(config, {}).bits();
  for (const Layout& layout : {Layout{4, false, 1, 12}, Layout{4, true, 1, 12}, Layout{1, false, 4, 3}, Layout{}}) {
    INFO(describe(layout));
    CHECK((train_hashed(config, layout).bits() != one) == (layout.tensor * layout.data > 1));
  }
}

TEST_CASE("control: other leaves or workers are other sums") {
  const Bits one = train_hashed(control_run(), {}).bits();
  Config leaves = control_run();
  leaves.numerics.leaves = 8;  // a product cut inside what was a leaf
  CHECK(train_hashed(leaves, {}).bits() != one);
  Config workers = control_run();
  workers.numerics.workers = 6;  // not 12: a tree of three is a chain of three
  CHECK(train_hashed(workers, {}).bits() != one);
}

TEST_CASE("control: a weight's gradient as one product over two samples has other bits") {
  constexpr int64_t kSequence = 16, kOut = 24, kIn = 32;
  const Stream stream(DeviceType::kCpu);
  const auto gradient = [&](int64_t samples) {
    Arena values("values", DeviceType::kCpu, 1 << 16);
    Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
    ParameterTable table;
    Weight weight;
    weight.rows = kOut;
    weight.cols = kIn;
    weight.parameters.emplace_back().shape = {kOut, kIn};
    const WeightId id = table.add(std::move(weight));
    table.allocate(values, gradients, DType::kF32);
    std::vector<float> d_y(2 * kSequence * kOut), x(2 * kSequence * kIn);
    for (size_t i = 0; i < d_y.size(); ++i) d_y[i] = std::sin(static_cast<float>(i));
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::cos(static_cast<float>(3 * i));
    const Tensor all_d_y(d_y.data(), DType::kF32, DeviceType::kCpu, {2 * kSequence, kOut});
    const Tensor all_x(x.data(), DType::kF32, DeviceType::kCpu, {2 * kSequence, kIn});
    const WorkerOrder order(1, samples, std::vector<Range>{{0, samples}}, 0, samples);
    struct Unheard : GradientListener {
      void gradient_done(WeightId /*id*/) override {}
    } unheard;
    const ops::Numerics numerics{true};
    InvariantGradients sink(table, order, numerics, unheard);
    const std::unique_ptr<Communicator> alone = make_self_communicator("tensor");
    TensorRegion region(*alone, false, 1);
    region.set_tokens(2 * kSequence);
    const SumContext ctx{stream, region, gradients, DType::kF32, 2 * kSequence / samples};
    sink.begin_micro_batch(ctx, 0);
    sink.add_product(ctx, id, {0, 2 * kSequence}, all_d_y, all_x);
    return read_f32(stream, table.flat_gradients(), {0, kOut * kIn});
  };
  CHECK(gradient(2) != gradient(1));
}
