#include "app/reference_case.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint/hf_weights.h"
#include "config/hf_config.h"
#include "config/validate_model.h"
#include "core/json_object.h"
#include "core/shown.h"
#include "core/tensor.h"
#include "parallel/logical_tensor.h"
#include "train/dry_run.h"
#include "train/step.h"

namespace invar::app {
namespace {

class CaseTokens : public TokenSource {
 public:
  CaseTokens(std::vector<int32_t> tokens, int64_t sequence_length)
      : TokenSource(sequence_length), tokens_(std::move(tokens)) {}
  int64_t samples() const override { return std::ssize(tokens_) / (sequence_length() + 1); }
  std::string describe() const override { return "tokens of a reference case"; }

 private:
  void fill(int64_t sample, std::span<int32_t> tokens) const override {
    std::copy_n(tokens_.begin() + sample * std::ssize(tokens), tokens.size(), tokens.begin());
  }
  std::vector<int32_t> tokens_;
};

std::vector<float> read_all(const SafetensorsReader& reader, const std::string& name) {
  const SafetensorsInfo& info = reader.info(name);
  std::vector<float> out(static_cast<size_t>(info.rows() * info.cols()));
  reader.read_rows(name, {0, info.rows()}, {0, info.cols()}, out);
  return out;
}

constexpr const char* kMakeAgain = "make the case again with tools/make_reference.py";

// One of batch, seq and steps of case.json.
int64_t read_count(const JsonObject& json, const char* name) {
  const int64_t count = json.integer(name);
  constexpr int64_t kMost = int64_t{1} << 40;  // so that nothing overflows before shapes are compared
  if (count <= 0 || count > kMost) json.refuse(format("not a case: {} must be an integer above 0", name), kMakeAgain);
  return count;
}

void check_shape(const SafetensorsReader& reader, const std::string& name, const std::vector<int64_t>& shape,
                 const char* whose = "case.json") {
  const SafetensorsInfo& info = reader.info(name);
  if (info.shape == shape) return;
  throw Error(ErrorKind::kData,
              format("{}: {} has the shape {}, but {} of {} was expected", info.file, shown(name),
                     describe_shape(info.shape), describe_shape(shape), whose),
              kMakeAgain);
}

// A result to compare with: what bf16 holds of one would be no reference.
void check_result(const SafetensorsReader& reader, const std::string& name, const std::vector<int64_t>& shape) {
  check_shape(reader, name, shape, "the case's model");
  const SafetensorsInfo& info = reader.info(name);
  if (info.dtype == "F32" || info.dtype == "F64") return;
  throw Error(ErrorKind::kData, format("{}: {} is {}, but F32 or F64 was expected", info.file, name, info.dtype),
              kMakeAgain);
}

// All that is compared, counted from the model: the activations, the gradients, and the trajectory.
void check_results(const SafetensorsReader& reader, const ModelConfig& model, int64_t batch, int64_t length,
                   int64_t steps) {
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    check_result(reader, format("hidden.{}", layer), {batch, length, model.hidden_size});
  }
  check_result(reader, "logits", {batch, length, model.vocab_size});
  check_result(reader, "traj_loss", {steps});
  check_result(reader, "traj_grad_norm", {steps});
  const std::string kind = "model/";
  for (const StateTensor& parameter : checkpoint_tensors(model)) {
    if (!parameter.name.starts_with(kind)) continue;
    const std::string gradient = "grad." + parameter.name.substr(kind.size());
    // A constant has none. That of a trained one is read before it is compared, so it cannot be left out.
    if (reader.contains(gradient)) check_result(reader, gradient, parameter.shape);
  }
}

// fp32_noise, of which the bands are made. 3: logits, gradients, losses; then of norms; then of hidden states, as
// make_reference.py came to measure them.
std::vector<double> read_noise(const SafetensorsReader& reader) {
  const std::string name = "fp32_noise";
  const int64_t kinds = reader.info(name).rows();
  check_shape(reader, name, {std::clamp<int64_t>(kinds, 3, 5)}, "3 to 5 kinds");
  const std::vector<float> noise = read_all(reader, name);
  for (const float value : noise) {
    if (value >= 0 && std::isfinite(value)) continue;
    throw Error(ErrorKind::kData, format("{}: {} holds {}, which bounds no error", reader.info(name).file, name, value),
                kMakeAgain);
  }
  return {noise.begin(), noise.end()};
}

struct OptimizerKey {
  const char* name;
  double OptimizerConfig::*member;
  bool (*holds)(double);
  const char* rule;
};
bool not_negative(double value) {
  return value >= 0;
}
bool positive(double value) {
  return value > 0;
}
bool fraction(double value) {
  return value >= 0 && value < 1;
}
constexpr OptimizerKey kOptimizerKeys[] = {
    {"lr", &OptimizerConfig::lr, not_negative, "a number of at least 0"},
    {"beta1", &OptimizerConfig::beta1, fraction, "a number of at least 0 and below 1"},
    {"beta2", &OptimizerConfig::beta2, fraction, "a number of at least 0 and below 1"},
    {"eps", &OptimizerConfig::eps, positive, "a number above 0"},
    {"weight_decay", &OptimizerConfig::weight_decay, not_negative, "a number of at least 0"},
    {"clip_grad", &OptimizerConfig::clip_grad, not_negative, "a number of at least 0"},
};

// "optimizer" of case.json: all keys and no others. Cases from before it was written there all used the same one.
OptimizerConfig read_optimizer(const JsonObject& json) {
  OptimizerConfig optimizer{3e-4, 0.9, 0.95, 1e-6, 0.1, 1.0};
  if (!json.has("optimizer") && !json.is_null("optimizer")) return optimizer;
  const JsonObject given = json.object("optimizer");
  for (const OptimizerKey& key : kOptimizerKeys) {
    const bool is_number = given.is_number(key.name);
    if (is_number) optimizer.*key.member = given.number(key.name, 0);
    if (is_number && key.holds(optimizer.*key.member)) continue;
    given.refuse(format("{} must be {}", given.full_name(key.name), key.rule), kMakeAgain);
  }
  for (const std::string& name : given.names()) {
    if (std::any_of(std::begin(kOptimizerKeys), std::end(kOptimizerKeys),
                    [&](const OptimizerKey& key) { return name == key.name; })) {
      continue;
    }
    given.refuse(format("unknown key {}", given.full_name(name)), kMakeAgain);
  }
  return optimizer;
}

// (steps, batch, sequence + 1), all in [0, vocabulary).
std::vector<int32_t> read_tokens(const SafetensorsReader& reader, int64_t vocabulary) {
  const std::vector<int64_t> ids = reader.read_i64("tokens");
  const SafetensorsInfo& info = reader.info("tokens");
  const auto bad = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= vocabulary; });
  if (bad == ids.end()) return {ids.begin(), ids.end()};
  const int64_t at = bad - ids.begin();
  const int64_t sample = at / info.shape[2];
  throw Error(ErrorKind::kData,
              format("{}: tokens: step {}, sample {}, position {} has id {}, outside the vocabulary [0, {})", info.file,
                     sample / info.shape[1], sample % info.shape[1], at % info.shape[2], *bad, vocabulary),
              kMakeAgain);
}

// "model.layers.3.self_attn.q_proj.weight" -> "gradient self_attn.q_proj"
std::string gradient_kind(const std::string& name) {
  std::string kind = name;
  if (kind.starts_with("model.layers.")) kind = kind.substr(kind.find('.', 13) + 1);
  if (kind.starts_with("model.")) kind = kind.substr(6);
  if (kind.ends_with(".weight")) kind.resize(kind.size() - 7);
  return "gradient " + kind;
}

// Compares the activations of step 0 as the layers hand them over.
class ActivationComparison : public TensorSink {
 public:
  ActivationComparison(const ReferenceCase& reference, const Config& config, const ProcessGroups& groups,
                       Range vocabulary, AgreementTable& table)
      : reference_(reference), config_(config), groups_(groups), vocabulary_(vocabulary), table_(table) {
    first_sample_ =
        groups.topology.samples_of(reference.batch(), groups.reader()).begin - config.train.micro_batch_size;
    int64_t samples = 0;  // as the ranks see them: without sequence parallelism all of a replica see each
    for (int reader = 0; reader < groups.topology.readers(); ++reader) {
      const int64_t own = groups.topology.samples_of(reference.batch(), reader).size();
      samples += own * (config.parallel.sequence ? 1 : groups.topology.width(reader));
    }
    for (int64_t i = 0; i < config.model.num_hidden_layers; ++i) expect(format("hidden.{}", i), samples);
    expect("logits", reference.batch());
  }

  bool wants(std::string_view name) const override { return reference_.expected().contains(std::string(name)); }

  void record(const std::string& name, const Tensor& local, int64_t first_row) override {
    if (name == "hidden.0") first_sample_ += config_.train.micro_batch_size;
    const int64_t s = reference_.sequence_length();
    const bool is_logits = name == "logits";
    const int64_t first_col = is_logits ? vocabulary_.begin : 0;
    const int64_t cols = reference_.expected().info(name).shape.back();
    const std::vector<float> values = read_f32(Stream(DeviceType::kCpu), local, {0, local.numel()});
    for (int64_t row = 0; row < local.dim(0); ++row) {
      const int64_t token = first_sample_ * s + first_row + row;  // in the global batch
      for (int64_t col = first_col; col < std::min(cols, first_col + local.dim(1)); ++col) {
        const float got = values[static_cast<size_t>(row * local.dim(1) + col - first_col)];
        const float want = cache(name)[static_cast<size_t>(token * cols + col)];
        table_[is_logits ? "logits" : "hidden states"].add(got, want, band_of(name));
      }
    }
  }

 private:
  void expect(const std::string& name, int64_t samples) {
    const SafetensorsInfo& info = reference_.expected().info(name);
    Agreement& agreement = table_[name == "logits" ? "logits" : "hidden states"];
    agreement.band = band_of(name);
    agreement.expected_elements += info.rows() * info.cols() / reference_.batch() * samples;
  }
  double band_of(const std::string& name) const {
    return name == "logits" ? reference_.logits_band() : reference_.hidden_band();
  }
  const std::vector<float>& cache(const std::string& name) {
    auto& values = cache_[name];
    if (values.empty()) values = read_all(reference_.expected(), name);
    return values;
  }

  const ReferenceCase& reference_;
  const Config& config_;
  const ProcessGroups& groups_;
  Range vocabulary_;
  AgreementTable& table_;
  int64_t first_sample_ = 0;
  std::map<std::string, std::vector<float>> cache_;
};

// Hands everything on to a second sink as well.
class BothSinks : public TensorSink {
 public:
  BothSinks(TensorSink& first, TensorSink* second) : first_(first), second_(second) {}
  bool wants(std::string_view name) const override { return first_.wants(name) || second_wants(name); }
  void record(const std::string& name, const Tensor& local, int64_t first_row) override {
    if (first_.wants(name)) first_.record(name, local, first_row);
    if (second_wants(name)) second_->record(name, local, first_row);
  }

 private:
  bool second_wants(std::string_view name) const { return second_ != nullptr && second_->wants(name); }

  TensorSink& first_;
  TensorSink* second_;
};

// The rows that this rank owns.
void compare_gradients(const ReferenceCase& reference, const TrainState& state, AgreementTable& table) {
  for (const Weight& weight : state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      if (!parameter.trained) continue;
      Agreement& agreement = table[gradient_kind(parameter.name)];
      agreement.band = reference.gradient_band();
      agreement.expected_elements += parameter.numel();
    }
  }
  for (const OwnedRows& own : state.ownership().owned_rows()) {
    const Parameter& parameter = *own.parameter;
    if (!parameter.trained) continue;
    const std::vector<float> want = read_run(reference.expected(), "grad." + parameter.name, parameter, {own.rows, 0});
    const std::vector<float> got = read_f32(state.stream(), state.parameters().flat_gradients(), own.elements);
    Agreement& agreement = table[gradient_kind(parameter.name)];
    for (size_t i = 0; i < want.size(); ++i) agreement.add(got[i], want[i], reference.gradient_band());
  }
}

// Every rank has the same kinds. Counts of a scalar that each rank compares are given once.
void merge(AgreementTable& table, Communicator& world) {
  for (auto& [kind, agreement] : table) {
    agreement.worst = all_reduce_value(world, agreement.worst, ReduceOp::kMax);
    agreement.magnitude = all_reduce_value(world, agreement.magnitude, ReduceOp::kMax);
    agreement.elements = all_reduce_value(world, agreement.elements, ReduceOp::kSum);
  }
}

}  // namespace

ReferenceCase::ReferenceCase(const std::filesystem::path& folder)
    : expected_(folder / "expected.safetensors"), model_(read_hf_config(folder.string())) {
  model_.init = InitKind::kHuggingFace;
  validate_model(config());
  JsonRules rules;
  rules.fix = kMakeAgain;
  const JsonObject json = JsonObject::open((folder / "case.json").string(), rules);
  batch_ = read_count(json, "batch");
  sequence_length_ = read_count(json, "seq");
  steps_ = read_count(json, "steps");
  optimizer_ = read_optimizer(json);
  check_shape(expected_, "tokens", {steps_, batch_, sequence_length_ + 1});
  noise_ = read_noise(expected_);
  check_results(expected_, model_, batch_, sequence_length_, steps_);
  tokens_ = read_tokens(expected_, model_.vocab_size);
}

Config ReferenceCase::config() const {
  Config config;
  config.origin[""] = model_.hf_path + "/config.json";
  config.model = model_;
  config.numerics.precision = Precision::kF32;
  config.train.steps = steps_;
  config.train.sequence_length = sequence_length_;
  config.train.global_batch_size = batch_;
  config.optimizer = optimizer_;
  return config;
}

std::unique_ptr<TokenSource> ReferenceCase::tokens() const {
  return std::make_unique<CaseTokens>(tokens_, sequence_length_);
}

void Agreement::add(double got, double want, double error_band) {
  const double error = std::abs(got - want);
  band = error_band;
  magnitude = std::max(magnitude, std::abs(want));
  worst = std::max(worst, std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
  ++elements;
}

std::string_view Agreement::verdict() const {
  if (elements != expected_elements || elements == 0) return "INCOMPLETE";
  if (!(magnitude > band)) return "VACUOUS";
  return worst <= band ? "ok" : "OUTSIDE";
}

bool all_hold(const AgreementTable& table) {
  return !table.empty() &&
         std::all_of(table.begin(), table.end(), [](const auto& entry) { return entry.second.holds(); });
}

AgreementTable compare_with_reference(const ReferenceCase& reference, const Config& config, const ProcessGroups& groups,
                                      const Stream& stream, const Intervention& intervention) {
  Communicator& world = *groups.world;
  TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank(), stream.device()),
                   intervention.weights);
  load_hf_weights(state.parameters(), state.stream(), HfWeights(config.model.hf_path));
  state.adopt_values();
  if (intervention.prepared) intervention.prepared(state);

  AgreementTable table;
  ActivationComparison activations(reference, config, groups, state.model().vocabulary(), table);
  const auto tokens = reference.tokens();
  const DataStream data{*tokens, Sampler(SampleOrder::kSequential, tokens->samples(), 0)};
  const std::vector<float> losses = read_all(reference.expected(), "traj_loss");
  const std::vector<float> norms = read_all(reference.expected(), "traj_grad_norm");
  BothSinks sinks(activations, intervention.sink);
  table[kLosses] = {.band = reference.loss_band(), .expected_elements = reference.steps()};
  table[kGradientNorms] = {.band = reference.norm_band(), .expected_elements = reference.steps()};
  for (int64_t step = 0; step < reference.steps(); ++step) {
    StepHooks hooks;
    if (step == 0) {
      hooks.sink = &sinks;
      hooks.gradients_complete = [&](const StepResult&) { compare_gradients(reference, state, table); };
    }
    const StepResult result =
        run_step(state, config, groups, load_micro_batches(config, groups, data, step), step, hooks);
    if (world.rank() != 0) continue;
    const auto at = static_cast<size_t>(step);
    table[kLosses].add(result.loss, losses[at], reference.loss_band());
    table[kGradientNorms].add(result.grad_norm, norms[at], reference.norm_band());
  }
  merge(table, world);
  return table;
}

}  // namespace invar::app
