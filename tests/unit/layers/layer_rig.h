#pragma once

// A layer as a function of named inputs and weights, which can be evaluated at any layout of the tensor group, ranks
// being threads. The loss of a pass is Σ c · output with fixed random c. Everything is fp32; matrices that are compared
// are whole ("logical"), as fp64 lists.

#include <cmath>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <stdexcept>

#include "comm/thread_communicator.h"
#include "core/philox.h"
#include "layers/layer_context.h"
#include "ops/norm.h"
#include "parallel/poisoned_weights.h"

namespace invar::test {

using Values = std::vector<double>;
using Named = std::map<std::string, Values>;

struct Layout {
  int tensor = 1;
  bool sequence = false;
  int64_t leaves = 0;      // of invariant sums, with a worker per sample; 0: fast ones
  int64_t head_chunk = 1;  // NumericsContract::head_chunk_tokens
};

// How the ranks hold a matrix: rows of their local tokens, or all rows and a run of columns, or all of it.
enum class Held { kTokens, kColumns, kWhole };
struct Slot {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  Held held = Held::kTokens;
  std::function<Range(int size, int rank)> columns{};  // of kColumns
};

class Rank;
using Body = std::function<void(Rank&)>;

struct LayerCase {
  int64_t tokens = 22;
  int64_t sequence_length = 11;
  std::vector<Slot> inputs;
  std::vector<Slot> outputs;
  std::vector<int32_t> document_starts{};  // of each token, or none
  // Makes the layers out of rank.setup(); the body runs forward and, if wanted, backward.
  std::function<Body(Rank&)> make;
};

// Standard normal numbers that depend on the name alone.
inline Values normal_values(const std::string& name, int64_t n) {
  const Philox random(7, RandomPurpose::kWeights, hash_name(name));
  Values values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
  return values;
}
inline Values loss_weights(const Slot& output) {
  return normal_values("c of " + output.name, output.rows * output.cols);
}

// What one rank knows of a logical matrix: zero where it holds nothing, or where some ranks hold copies and it is not
// the first of them. Copies are equal on all ranks; otherwise the matrix is the sum over ranks.
struct Share {
  bool copy = false;
  Values values;
};
using Shares = std::vector<std::map<std::string, Share>>;  // by rank

inline Named combine(const Shares& shares) {
  Named whole;
  for (const auto& rank : shares) {
    for (const auto& [name, share] : rank) {
      auto [at, first] = whole.try_emplace(name, share.values);
      if (first) continue;
      if (share.copy && at->second != share.values) throw std::logic_error("ranks differ in " + name);
      if (share.copy) continue;
      for (size_t i = 0; i < share.values.size(); ++i) at->second[i] += share.values[i];
    }
  }
  return whole;
}

inline std::unique_ptr<SumPolicy> sums_of(const LayerCase& layer_case, const Layout& layout, const Stream& stream) {
  if (layout.leaves == 0) return fast_sums();
  const int64_t samples = layer_case.tokens / layer_case.sequence_length;
  NumericsContract contract;
  contract.leaves = layout.leaves;
  contract.workers = samples;
  contract.token_block = 1;
  contract.head_chunk_tokens = layout.head_chunk;
  return invariant_sums(contract, WorkerOrder(samples, samples, std::vector<Range>{{0, samples}}, 0, samples), stream);
}

// One rank of a pass: what layers need, and this rank's part of inputs, outputs and gradients. Whoever reads a weight
// that it does not hold reads NaN.
class Rank : GradientListener {
 public:
  Rank(const LayerCase& layer_case, const Layout& layout, Communicator& world, const Named& point, bool backward_too)
      : groups(make_process_groups(world, {layout.tensor, 1})),
        replicas(groups),
        sums(sums_of(layer_case, layout, stream)),
        region(*groups.tensor, layout.sequence, sums->token_block()),
        with_gradients(backward_too),
        case_(layer_case),
        point_(point),
        document_starts_(layer_case.document_starts) {
    region.set_tokens(case_.tokens);
  }

  // Before load_weights().
  LayerSetup setup() { return {table, replicas, *sums, region.sequence_parallel()}; }
  // After it.
  LayerContext context() {
    LayerContext ctx{sum_context(scratch), *sums, *weights_, *sink_, saved};
    if (!document_starts_.empty()) {
      ctx.document_starts = Tensor(document_starts_.data(), DType::kI32, DeviceType::kCpu, {case_.tokens});
    }
    return ctx;
  }
  int64_t local_tokens() const { return region.local_tokens().size(); }
  Tensor allocate(int64_t rows, int64_t cols) { return saved.allocate("test", DType::kF32, {rows, cols}); }
  const ops::RopeTable& rope(double theta, int64_t head_dim, int64_t rotated_pairs) {
    ops::RopeTable& table_of_angles = ropes_.emplace_back();
    for (Tensor* part : {&table_of_angles.cos, &table_of_angles.sin}) {
      *part = constants_.allocate("rope", DType::kF32, {case_.sequence_length, head_dim / 2});
    }
    ops::fill_rope_table(stream, table_of_angles, theta, head_dim, rotated_pairs);
    return table_of_angles;
  }

  // This rank's part of an input, and of c: what backward starts from.
  Tensor input(const std::string& name) { return cut(slot(case_.inputs, name), point_.at(name)); }
  Tensor output_gradient(const std::string& name) {
    return cut(slot(case_.outputs, name), loss_weights(slot(case_.outputs, name)));
  }
  void give(const std::string& name, const Tensor& part) { outputs[name] = share(slot(case_.outputs, name), part); }
  void give(const std::string& name, double value) { outputs[name] = {true, {value}}; }
  void give_gradient(const std::string& name, const Tensor& part) {
    gradients[name] = share(slot(case_.inputs, name), part);
  }

  void load_weights() {
    table.allocate(parameters_, weight_gradients_, DType::kF32, sums->gradient_layout());
    table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
      const Values& values = point_.at(parameter.name);
      for_each_element(weight, parameter, run, elements, [&](size_t logical, int64_t stored) {
        table.flat_values().data<float>()[stored] = static_cast<float>(values[logical]);
      });
    });
    weights_.emplace(table, nullptr, stream);
    sink_ = sums->gradients(table, *this);
  }
  // Around the body.
  void begin() {
    of_micro_batch_.release(0);
    done_.clear();
    if (with_gradients) sink_->begin_micro_batch(sum_context(of_micro_batch_), 0);
  }
  // Layers have said once for each use of a weight that its gradient is there.
  void end() {
    if (!with_gradients) return;
    sink_->end_micro_batch(sum_context(of_micro_batch_));
    for (WeightId id = 0; id < static_cast<WeightId>(table.weights().size()); ++id) {
      const Weight& weight = table.weight(id);
      if (done_[id] != weight.users) throw std::logic_error(weight.name + " is not done once for each user");
    }
  }
  // Adds the weights' gradients to `gradients`. Nothing may be outside of parameters that are trained.
  void collect_weight_gradients() {
    const float* flat = table.flat_gradients().data<float>();
    int64_t outside = 0;
    for (const float gradient : table.flat_gradients().span<float>()) outside += gradient != 0;
    for (const Weight& weight : table.weights()) {
      for (const Parameter& parameter : weight.parameters) {
        if (!parameter.trained) continue;
        Share& mine = gradients[parameter.name];
        mine.copy = is_copy(parameter) && parameter.replicas->size() == groups.tensor->size();
        mine.values.assign(static_cast<size_t>(parameter.numel()), 0.0);
      }
    }
    table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
      if (!parameter.trained) return;
      Share& mine = gradients.at(parameter.name);
      const bool elsewhere = is_copy(parameter) && !mine.copy && !parameter.counted();
      Values& values = mine.values;
      for_each_element(weight, parameter, run, elements, [&](size_t logical, int64_t stored) {
        values[logical] = elsewhere ? 0.0 : finite(flat[stored]);
        outside -= flat[stored] != 0;
      });
    });
    if (outside != 0) throw std::logic_error("a gradient outside of trained parameters");
  }

  // Gives back what is above the mark; whoever reads it later reads NaN.
  static void poison(Arena& arena, Arena::Mark mark = 0) {
    arena.release(mark);
    const Tensor rest = arena.allocate("poison", DType::kF32, {(arena.capacity() - mark) / 4});
    std::memset(rest.raw(), 0xff, static_cast<size_t>(rest.bytes()));
    arena.release(mark);
  }

  ProcessGroups groups;
  ReplicaGroups replicas;
  Stream stream{DeviceType::kCpu};
  std::unique_ptr<SumPolicy> sums;
  TensorRegion region;
  ParameterTable table;
  Arena saved{"saved", DeviceType::kCpu, 1 << 19};
  Arena scratch{"scratch", DeviceType::kCpu, 1 << 19};
  bool with_gradients = false;
  std::map<std::string, Share> outputs;
  std::map<std::string, Share> gradients;

 private:
  void gradient_done(WeightId id) override { ++done_[id]; }
  SumContext sum_context(Arena& arena) const { return {stream, region, arena, DType::kF32, case_.sequence_length}; }
  static bool is_copy(const Parameter& parameter) {
    return parameter.replicas != nullptr && !parameter.partial_gradient;
  }
  static double finite(float value) {
    if (!std::isfinite(value)) throw std::logic_error("a value that is not finite");
    return static_cast<double>(value);
  }
  static const Slot& slot(const std::vector<Slot>& slots, const std::string& name) {
    for (const Slot& candidate : slots) {
      if (candidate.name == name) return candidate;
    }
    throw std::logic_error("no slot " + name);
  }
  template <class Visit>
  static void for_each_element(const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements,
                               Visit visit) {
    for (int64_t i = 0; i < elements.size(); ++i) {
      const int64_t logical = parameter.logical_index(run.global.begin + i / weight.cols, i % weight.cols);
      visit(static_cast<size_t>(logical), elements.begin + i);
    }
  }
  Range rows_of(const Slot& s) const { return s.held == Held::kTokens ? region.local_tokens() : Range{0, s.rows}; }
  Range columns_of(const Slot& s) const {
    return s.held == Held::kColumns ? s.columns(groups.tensor->size(), groups.tensor->rank()) : Range{0, s.cols};
  }
  template <class Visit>
  void for_each_held(const Slot& s, Visit visit) const {
    int64_t at = 0;
    for (int64_t row = rows_of(s).begin; row < rows_of(s).end; ++row) {
      for (int64_t col = columns_of(s).begin; col < columns_of(s).end; ++col) {
        visit(static_cast<size_t>(row * s.cols + col), at++);
      }
    }
  }
  Tensor cut(const Slot& s, const Values& whole) {
    const Tensor part = allocate(rows_of(s).size(), columns_of(s).size());
    for_each_held(s, [&](size_t logical, int64_t at) { part.data<float>()[at] = static_cast<float>(whole[logical]); });
    return part;
  }
  Share share(const Slot& s, const Tensor& part) const {
    if (part.dim(0) != rows_of(s).size() || part.dim(1) != columns_of(s).size()) {
      throw std::logic_error(s.name + " has the shape " + part.describe());
    }
    Share mine;
    mine.copy = s.held == Held::kWhole || (s.held == Held::kTokens && !region.sequence_parallel());
    mine.values.assign(static_cast<size_t>(s.rows * s.cols), 0.0);
    for_each_held(s, [&](size_t logical, int64_t at) { mine.values[logical] = finite(part.data<float>()[at]); });
    return mine;
  }

  const LayerCase& case_;
  const Named& point_;
  std::vector<int32_t> document_starts_;
  std::optional<PoisonedWeights> weights_;
  std::unique_ptr<GradientSink> sink_;
  std::map<WeightId, int> done_;  // of the micro-batch
  std::list<ops::RopeTable> ropes_;
  Arena parameters_{"parameters", DeviceType::kCpu, 1 << 18};
  Arena weight_gradients_{"gradients", DeviceType::kCpu, 1 << 18};
  Arena constants_{"constants", DeviceType::kCpu, 1 << 14};
  Arena of_micro_batch_{"sums of the micro-batch", DeviceType::kCpu, 1 << 18};
};

struct PassResult {
  Shares outputs;
  Shares gradients;  // of inputs and trained weights
};

// Weights' gradients add up over `times`; the rest is that of the last.
inline PassResult run(const LayerCase& layer_case, const Named& point, const Layout& layout, bool with_gradients = true,
                      int times = 1) {
  PassResult pass;
  pass.outputs.resize(static_cast<size_t>(layout.tensor));
  pass.gradients.resize(static_cast<size_t>(layout.tensor));
  run_thread_ranks(layout.tensor, [&](Communicator& world) {
    Rank rank(layer_case, layout, world, point, with_gradients);
    const Body body = layer_case.make(rank);
    rank.load_weights();
    for (int time = 0; time < times; ++time) {
      for (Arena* arena : {&rank.saved, &rank.scratch}) Rank::poison(*arena);
      rank.begin();
      body(rank);
      rank.end();
    }
    if (with_gradients) rank.collect_weight_gradients();
    pass.outputs[static_cast<size_t>(world.rank())] = std::move(rank.outputs);
    pass.gradients[static_cast<size_t>(world.rank())] = std::move(rank.gradients);
  });
  return pass;
}

// Inputs of order one; matrices that keep that order; vectors around one.
inline Named start_point(const LayerCase& layer_case) {
  Named point;
  for (const Slot& input : layer_case.inputs) point[input.name] = normal_values(input.name, input.rows * input.cols);
  run_thread_ranks(1, [&](Communicator& world) {
    Rank rank(layer_case, {}, world, point, false);
    const Body body = layer_case.make(rank);
    for (const Weight& weight : rank.table.weights()) {
      for (const Parameter& parameter : weight.parameters) {
        Values values = normal_values(parameter.name, parameter.numel());
        const bool vector = parameter.shape.size() == 1;
        const double scale = vector ? 0.3 : 1.0 / std::sqrt(static_cast<double>(parameter.shape[1]));
        for (double& value : values) value = (vector ? 1.0 : 0.0) + scale * value;
        point[parameter.name] = std::move(values);
      }
    }
  });
  return point;
}

}  // namespace invar::test
