// What goes wrong in Gemma 4 trainers, done on purpose: each mistake must leave the band of the reference comparison,
// in the tensors that it concerns. And facts of the model that a comparison of whole runs would not single out.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "app/reference_case.h"
#include "checkpoint/hf_weights.h"
#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "config/layer_kinds.h"
#include "ops/cross_entropy.h"
#include "parallel/logical_tensor.h"
#include "parallel/poisoned_weights.h"
#include "support/rank_checks.h"
#include "support/wrapped_communicator.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::app;

namespace {

const ReferenceCase& e4b() {
  static const ReferenceCase kCase(INVAR_SOURCE_DIR "/tests/reference/gemma4_e4b");
  return kCase;
}

Config layout(int tensor, bool sequence) {
  Config config = e4b().config();
  config.parallel.tensor = tensor;
  config.parallel.sequence = sequence;
  config.train.micro_batch_size = e4b().batch();
  return config;
}

// What one rank does wrong.
using Mistake = std::function<Intervention(WrappedCommunicator& tensor)>;

AgreementTable compare(const Config& config, const Mistake& mistake = {}) {
  AgreementTable result;
  std::mutex mutex;
  run_thread_ranks(config.parallel.tensor, [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, {config.parallel.tensor, 1});
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(groups.tensor));
    WrappedCommunicator& tensor = *wrapped;
    groups.tensor = std::move(wrapped);
    const Intervention intervention = mistake ? mistake(tensor) : Intervention{};
    const AgreementTable table = compare_with_reference(e4b(), config, groups, Stream(DeviceType::kCpu), intervention);
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) result = table;
  });
  return result;
}

bool outside(const AgreementTable& table, const std::string& kind) {
  return !table.at(kind).holds();
}

// The sums over ranks of the per-layer norm: f32 (T, L), first of squares, then of dots.
bool is_per_layer_sum(const Tensor& buffer) {
  return buffer.dims() == 2 && buffer.dim(0) == e4b().batch() * e4b().sequence_length() &&
         buffer.dim(1) == e4b().config().model.num_hidden_layers;
}

// Keeps this rank's own terms of the first (squares) or second (dots) such sum of every pass.
Mistake without_per_layer_sum(int which) {
  return [which](WrappedCommunicator& tensor) {
    tensor.tamper_with_all_reduce([which, count = 0](const Tensor& buffer) mutable {
      if (!is_per_layer_sum(buffer) || count++ % 2 != which) return std::function<void()>();
      std::vector<float> own = read_f32(Stream(DeviceType::kCpu), buffer, {0, buffer.numel()});
      return std::function<void()>(
          [own = std::move(own), buffer] { std::copy(own.begin(), own.end(), buffer.data<float>()); });
    });
    return Intervention{};
  };
}

}  // namespace

TEST_CASE("no mistake: the comparison holds with everything wrapped") {
  CHECK(all_hold(compare(layout(1, false))));
  CHECK(all_hold(compare(layout(2, true), [](WrappedCommunicator&) { return Intervention{}; })));
}

TEST_CASE("a window that is off by one is noticed") {
  for (const int64_t change : {-1, 1}) {
    Config config = layout(1, false);
    config.model.sliding_window += change;
    const AgreementTable table = compare(config);
    CHECK(outside(table, "logits"));
    CHECK(outside(table, "hidden states"));
  }
}

TEST_CASE("a window is bounded by the sequence: one beyond it changes nothing more") {
  Config config = layout(1, false);
  config.model.sliding_window = e4b().sequence_length();
  const AgreementTable all = compare(config);
  config.model.sliding_window += 7;
  CHECK(compare(config).at("logits").worst == all.at("logits").worst);
}

TEST_CASE("RoPE frequencies with the rotated part instead of the head as denominator are noticed") {
  Config config = layout(1, false);
  const ModelConfig& model = config.model;
  const double d = static_cast<double>(model.global_head_dim);
  const double rotated = std::floor(model.partial_rotary_factor * d / 2);
  // theta'^(−2k/d) = theta^(−2k/(2·rotated))
  config.model.rope_theta = std::pow(model.rope_theta, d / (2 * rotated));
  const AgreementTable table = compare(config);
  CHECK(outside(table, "logits"));
  CHECK(outside(table, "gradient self_attn.q_norm"));
}

TEST_CASE("turning the first channels of a head instead of its pairs is noticed") {
  Config config = layout(1, false);
  config.model.partial_rotary_factor = 1.0;
  CHECK(outside(compare(config), "logits"));
}

TEST_CASE("an unscaled embedding, a lost softcap and a lost layer scalar are noticed") {
  Config config = layout(1, false);
  config.model.final_logit_softcapping = 0;
  CHECK(outside(compare(config), "logits"));
  const auto ones = [](WrappedCommunicator&) {
    return Intervention{
        [](TrainState& state) {
          const Tensor& values = state.parameters().flat_values();
          state.parameters().for_each_run([&](const Weight&, const Parameter& p, const RowRun&, Range at) {
            if (p.name.ends_with("layer_scalar")) values.data<float>()[at.begin] = 1.0f;
          });
        },
        nullptr};
  };
  CHECK(outside(compare(layout(1, false), ones), "hidden states"));
}

TEST_CASE("the per-layer norm needs both of its sums over ranks") {
  const AgreementTable squares = compare(layout(2, true), without_per_layer_sum(0));
  CHECK(outside(squares, "hidden states"));
  const AgreementTable dots = compare(layout(2, true), without_per_layer_sum(1));
  CHECK_FALSE(outside(dots, "hidden states"));
  CHECK(outside(dots, "gradient per_layer_model_projection"));
  CHECK(outside(dots, "gradient embed_tokens"));
  CHECK_FALSE(outside(dots, "gradient embed_tokens_per_layer"));
  CHECK_FALSE(outside(dots, "gradient mlp.down_proj"));
}

// The embedded tokens are gathered for the per-layer projection. Each rank's gradient of them covers its own columns,
// so backward sums over ranks. With the whole of it on every rank a sum would count it once per rank; and here, taking
// only the own rows loses the others' columns.
TEST_CASE("the gather before the per-layer projection has one right backward") {
  constexpr int kTensor = 2;
  const auto count_sums = [] {
    std::vector<int> count(kTensor);
    compare(layout(kTensor, true), [&](WrappedCommunicator& tensor) {
      int& mine = count[static_cast<size_t>(tensor.rank())];
      tensor.tamper_with_reduce_scatter([&mine](const auto&, int64_t, const Tensor&) { ++mine; });
      return Intervention{};
    });
    return count.front() / static_cast<int>(e4b().steps());  // of one step; the projection's is the last
  };
  const int per_step = count_sums();
  CHECK(per_step == 75);
  for (const bool overcount : {false, true}) {
    const AgreementTable table = compare(layout(kTensor, true), [&](WrappedCommunicator& tensor) {
      tensor.tamper_with_reduce_scatter(
          [=, index = 0](const std::vector<float>& sent, int64_t own_begin, const Tensor& received) mutable {
            if (++index % per_step != 0) return;
            float* to = received.data<float>();
            for (int64_t i = 0; i < received.numel(); ++i) {
              to[i] = overcount ? kTensor * to[i] : sent[static_cast<size_t>(own_begin + i)];
            }
          });
      return Intervention{};
    });
    CHECK(outside(table, "gradient embed_tokens"));
    CHECK_FALSE(outside(table, "gradient per_layer_model_projection"));
    CHECK_FALSE(outside(table, "gradient self_attn.k_proj"));
    CHECK_FALSE(outside(table, "hidden states"));
  }
}

namespace {

// Takes back what one layer has added to the gradient of shared keys and values.
class DropContribution : public TensorSink {
 public:
  explicit DropContribution(int64_t layer) : layer_(layer) {}
  bool wants(std::string_view name) const override { return name.starts_with("d_kv."); }
  void record(const std::string& name, const Tensor& d_kv, int64_t) override {
    std::vector<float>& before = before_[d_kv.raw()];
    before.resize(static_cast<size_t>(d_kv.numel()));
    if (name == format("d_kv.{}", layer_)) {
      std::copy(before.begin(), before.end(), d_kv.data<float>());
    } else {
      before = read_f32(Stream(DeviceType::kCpu), d_kv, {0, d_kv.numel()});
    }
  }

 private:
  int64_t layer_;
  std::map<const void*, std::vector<float>> before_;
};

}  // namespace

TEST_CASE("one borrower's gradient of the shared keys and values, dropped, is noticed") {
  const ModelConfig model = e4b().config().model;
  for (const RecomputeKind recompute : {RecomputeKind::kNone, RecomputeKind::kSelective, RecomputeKind::kFull}) {
    Config config = layout(2, true);
    config.train.recompute = recompute;
    for (const int64_t layer : {8, 11}) {
      REQUIRE(shares_key_values(model, layer));
      std::vector<DropContribution> sinks(2, DropContribution(layer));
      const AgreementTable table = compare(config, [&](WrappedCommunicator& tensor) {
        return Intervention{{}, &sinks[static_cast<size_t>(tensor.rank())]};
      });
      CHECK(outside(table, "gradient self_attn.k_proj"));
      CHECK(outside(table, "gradient self_attn.v_proj"));
      CHECK(outside(table, "gradient self_attn.k_norm"));
      CHECK_FALSE(outside(table, "hidden states"));
    }
    std::vector<DropContribution> nothing(2, DropContribution(-1));
    CHECK(all_hold(compare(config, [&](WrappedCommunicator& tensor) {
      return Intervention{{}, &nothing[static_cast<size_t>(tensor.rank())]};
    })));
  }
}

// A cap of 1 makes padding weigh: capped after masking, each padded column counts like a logit of −1.
TEST_CASE("padding is masked after the softcap; the other order is noticed") {
  constexpr int64_t kVocab = 250;
  constexpr Range kRows{0, 256};
  constexpr float kCap = 1.0f;
  const Stream stream(DeviceType::kCpu);
  std::vector<float> logits(256);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::sin(static_cast<float>(i));
  double exact = 0;
  for (int64_t i = 0; i < kVocab; ++i) exact += std::exp(std::tanh(double{logits[static_cast<size_t>(i)]}));
  const auto sum_of = [&](int64_t vocabulary, float padding) {
    std::vector<float> x = logits;
    std::fill(x.begin() + kVocab, x.end(), padding);
    std::vector<float> out(3);
    std::vector<int32_t> label = {3};
    const auto f32 = [](std::vector<float>& v, size_t at, std::initializer_list<int64_t> shape) {
      return Tensor(v.data() + at, DType::kF32, DeviceType::kCpu, shape);
    };
    const Tensor row = f32(x, 0, {1, 256});
    ops::softcap(stream, kCap, row);
    ops::logits_statistics(stream, row, {0, row.dim(1)}, Tensor(label.data(), DType::kI32, DeviceType::kCpu, {1}),
                           kRows, vocabulary, f32(out, 0, {1}), f32(out, 1, {1}), f32(out, 2, {1}));
    return double{out[1]} * std::exp(double{out[0]});
  };
  for (const float padding : {0.0f, 1e9f, -1e9f}) CHECK(sum_of(kVocab, padding) == Approx(exact).epsilon(1e-6));
  const float masked = -std::numeric_limits<float>::infinity();
  CHECK(sum_of(256, masked) == Approx(exact + 6 * std::exp(-1.0)).epsilon(1e-6));
}

namespace {

// Every layer's output of step 0 on one rank, after `edit` has changed the weights by name.
using Edit = std::function<void(const Parameter&, std::span<float>)>;
std::vector<std::vector<float>> hidden_states(const Edit& edit) {
  class Keep : public TensorSink {
   public:
    bool wants(std::string_view name) const override { return name.starts_with("hidden."); }
    void record(const std::string&, const Tensor& local, int64_t) override {
      states.push_back(read_f32(Stream(DeviceType::kCpu), local, {0, local.numel()}));
    }
    std::vector<std::vector<float>> states;
  } keep;
  const Config config = layout(1, false);
  const auto world = make_self_communicator();
  const ProcessGroups groups = make_process_groups(*world, {1, 1});
  const Stream stream(DeviceType::kCpu);
  TrainState state(config, groups, stream, measure_memory(config, groups.topology, 0), poisoned_weights);
  load_hf_weights(state.parameters(), state.stream(), HfWeights(config.model.hf_path));
  const Tensor& values = state.parameters().flat_values();
  state.parameters().for_each_run([&](const Weight&, const Parameter& p, const RowRun&, Range at) {
    edit(p, {values.data<float>() + at.begin, static_cast<size_t>(at.size())});
  });
  state.adopt_values();
  const auto tokens = e4b().tokens();
  const DataStream data{*tokens, Sampler(SampleOrder::kSequential, tokens->samples(), 0)};
  state.evaluate(load_micro_batches(config, groups, data, 0).front(), &keep);
  return keep.states;
}

}  // namespace

TEST_CASE("borrowers see the producer's keys, not its output") {
  const ModelConfig model = e4b().config().model;
  const int64_t layers = model.num_hidden_layers;
  for (const int64_t borrower : {layers - 2, layers - 1}) {
    const int64_t producer = key_value_source(model, borrower);
    REQUIRE(provides_key_values(model, producer));
    const std::string prefix = format("model.layers.{}.self_attn.", producer);
    const auto silenced = [&](float change) {
      return hidden_states([&](const Parameter& p, std::span<float> values) {
        if (p.name == prefix + "o_proj.weight") std::fill(values.begin(), values.end(), 0.0f);
        if (p.name == prefix + "k_proj.weight") values[5] += change;
      });
    };
    const auto before = silenced(0);
    const auto after = silenced(0.5f);
    int64_t first_borrower = 0;
    while (!shares_key_values(model, first_borrower) || key_value_source(model, first_borrower) != producer) {
      ++first_borrower;
    }
    for (int64_t i = 0; i < layers; ++i) {
      INFO("layer " << i << " producer " << producer);
      const auto at = static_cast<size_t>(i);
      CHECK((before[at] == after[at]) == (i < first_borrower));
    }
  }
}
