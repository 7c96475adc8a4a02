// The 17 cases that Megatron-LM's first nonuniform tensor parallelism was tested by (pull request 2149), in their
// order, each as what it comes to here; and that nothing of all this is left where no rank has failed.
#include <set>

#include "config/failed_slots.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "parallel/shared_rows.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"
#include "support/wrapped_communicator.h"
#include "train/dry_run.h"
#include "train/rank_layouts.h"
#include "trajectory.h"

using namespace invar;
using namespace invar::test;

namespace {

using Widths = std::vector<int>;
using Counts = std::vector<int64_t>;

// 24 heads and 4096 FFN columns, in blocks of 32.
Config model_of_the_cases() {
  Config config;
  config.model.vocab_size = 250;
  config.model.hidden_size = 8;
  config.model.intermediate_size = 4096;
  config.model.num_hidden_layers = 1;
  config.model.num_attention_heads = config.model.num_key_value_heads = 24;
  config.model.head_dim = 2;
  config.numerics.precision = Precision::kF32;
  config.train.steps = 1;
  config.train.sequence_length = 8;
  config.train.global_batch_size = 16;
  return config;
}

// Two replicas of `base` slots, of which the first `reduced` lack some, in Megatron-LM's form.
Config listed(int base, int spares, int reduced, const IntegerLists& lists = {}) {
  Config config = model_of_the_cases();
  config.parallel.tensor = config.parallel.nonuniform.tp_base = base;
  config.parallel.data = 2;
  config.parallel.nonuniform.tp_spares = spares;
  config.parallel.nonuniform.num_reduced_tp_dp_ranks = reduced;
  config.parallel.nonuniform.non_active_ranks_per_dp = lists;
  return config;
}

ReplicaPlan plan_of(const Config& config) {
  return plan_replicas(config, 2 * config.parallel.tensor);
}

std::vector<int> live_slots_of_first_replica(const Config& config) {
  const ReplicaPlan plan = plan_of(config);
  std::vector<int> slots;
  for (const int rank : plan.training_order()) {
    const ReplicaPlan::Place& place = plan.places[static_cast<size_t>(rank)];
    if (place.grid_replica == 0) slots.push_back(place.grid_slot);
  }
  return slots;
}

// Every rank's parameters, without memory.
RankLayouts layouts_of(const Config& config) {
  static const std::unique_ptr<SumPolicy> fast = fast_sums();
  DecoderModel::Options options;
  options.sequence_length = config.train.sequence_length;
  return {decoder_spec(config.model), topology_of(plan_of(config)), *fast, options};
}

const ParameterTable& table_of(const RankLayouts& ranks, int world_rank) {
  return *ranks.tables()[static_cast<size_t>(world_rank)];
}

WeightId weight_with(const ParameterTable& table, const std::string& end_of_name) {
  for (size_t id = 0; id < table.weights().size(); ++id) {
    for (const Parameter& parameter : table.weights()[id].parameters) {
      if (parameter.name.ends_with(end_of_name)) return static_cast<WeightId>(id);
    }
  }
  throw Error(ErrorKind::kFault, "no " + end_of_name);
}

// Of a weight, in `units` units: how many each rank of the second, healthy replica shares with each of the reduced one.
std::vector<Counts> shared_units(const Config& config, const std::string& parameter, int64_t units) {
  const Topology topology = topology_of(plan_of(config));
  const RankLayouts ranks = layouts_of(config);
  const WeightId id = weight_with(table_of(ranks, 0), parameter);
  int64_t elements = 0;
  for (int rank = 0; rank < topology.width(0); ++rank) elements += table_of(ranks, rank).weight(id).elements().size();
  const std::vector<SharedBlock> blocks = shared_rows(topology, ranks.tables(), {&id, 1});
  std::vector<Counts> shared(static_cast<size_t>(topology.width(1)), Counts(static_cast<size_t>(topology.width(0))));
  for (const SharedBlock& block : blocks) {
    const auto reduced = static_cast<size_t>(block.holders[0].world_rank);
    const auto healthy = static_cast<size_t>(topology.tensor_rank(block.holders[1].world_rank));
    shared[healthy][reduced] += block.elements * units / elements;
  }
  return shared;
}

Counts row_sums(const std::vector<Counts>& table) {
  Counts sums;
  for (const Counts& row : table) sums.push_back(std::reduce(row.begin(), row.end()));
  return sums;
}

Counts column(const std::vector<Counts>& table, size_t at) {
  Counts entries;
  for (const Counts& row : table) entries.push_back(row[at]);
  return entries;
}

Counts column_sums(const std::vector<Counts>& table) {
  Counts sums;
  for (size_t i = 0; i < table.front().size(); ++i) {
    const Counts entries = column(table, i);
    sums.push_back(std::reduce(entries.begin(), entries.end()));
  }
  return sums;
}

// What each rank sends in a step, by group and operation: calls and bytes; and the memory that it takes.
using Sent = std::map<std::string, std::pair<int64_t, int64_t>>;
std::vector<Sent> sent_of(Config config, int launched) {
  validate(config, launched);
  const ReplicaPlan plan = plan_replicas(config, launched);
  config.train.global_batch_size = plan.batch();
  const Topology topology = topology_of(plan);
  std::vector<Sent> all;
  for (int rank = 0; rank < topology.world(); ++rank) {
    TrafficTable traffic;
    const MemorySizes memory = measure_memory(config, topology, rank, DeviceType::kCpu, &traffic);
    Sent& sent = all.emplace_back();
    for (const auto& [name, counts] : traffic) sent[name] = {counts.calls, counts.bytes};
    sent["memory"] = {0, memory.total()};
  }
  return all;
}

bool exchanges_gradients(const Sent& sent) {
  return std::ranges::any_of(sent, [](const auto& entry) { return entry.first.starts_with("gradients "); });
}

// TP 4 and 2 spares: six ranks that train, and two that idle.
Config end_to_end() {
  Config config = listed(4, 2, 1);
  config.model.hidden_size = 24;
  config.model.intermediate_size = 96;
  config.train.micro_batch_size = 2;
  config.train.global_batch_size = plan_of(config).batch();
  return config;
}

using OnRank = std::function<void(const Config& config, ProcessGroups& groups)>;
void on_ranks_end_to_end(const OnRank& body) {
  const Config config = end_to_end();
  const Topology topology = topology_of(plan_of(config));
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, topology);
    body(config, groups);
  });
}

void no_failures() {
  const Config config = listed(8, 0, 1);
  CHECK(failed_slots(config, 16, {}).empty());
  CHECK(plan_of(config).uniform());
}

void uniform_failures() {
  const Config config = listed(8, 2, 2, {{"0", {2, 5}}, {"1", {6, 7}}});
  CHECK(failed_slots(config, 16, {}) == std::set<int>{2, 5, 14, 15});
  CHECK(plan_of(config).widths == Widths{6, 6});
}

// Nothing is padded to {1: [1, 7]}: widths may all differ.
void nonuniform_failures() {
  const Config config = listed(8, 2, 2, {{"0", {2, 5}}, {"1", {1}}});
  CHECK(failed_slots(config, 16, {}) == std::set<int>{2, 5, 9});
  CHECK(plan_of(config).widths == Widths{6, 7});
}

void default_active_list() {
  CHECK(live_slots_of_first_replica(listed(8, 2, 1)) == std::vector<int>{0, 1, 2, 3, 4, 5});
}

void explicit_active_list() {
  CHECK(live_slots_of_first_replica(listed(8, 2, 1, {{"0", {2, 5}}})) == std::vector<int>{0, 1, 3, 4, 6, 7});
}

// Parameters of a uniform run are not looked at by other ranks: a bucket is one block, without holders.
void map_without_spares() {
  const Config config = listed(8, 0, 1);
  const RankLayouts ranks = layouts_of(config);
  const RowOwnership ownership(table_of(ranks, 0), 2, 0, config.parallel.bucket_size);
  for (const RowOwnership::Bucket& bucket : ownership.buckets()) {
    CHECK(bucket.blocks.size() == 1);
    CHECK(bucket.blocks.front().holders.empty());
    CHECK(bucket.blocks.front().copies.empty());
  }
}

// 24 units on 8 ranks and on 6: of 3 and 4 units. What a rank of 6 gets from each of 8 is a list of 8.
void map_of_a_healthy_rank() {
  const std::vector<Counts> shared = shared_units(listed(8, 2, 1), "self_attn.q_proj.weight", 24);
  CHECK(row_sums(shared) == Counts(8, 3));
  CHECK(column_sums(shared) == Counts(6, 4));
  CHECK(shared[0] == Counts{3, 0, 0, 0, 0, 0});
  CHECK(shared[1] == Counts{1, 2, 0, 0, 0, 0});
  CHECK(shared[7] == Counts{0, 0, 0, 0, 0, 3});
  CHECK(column(shared, 0) == Counts{3, 1, 0, 0, 0, 0, 0, 0});
  CHECK(column(shared, 4) == Counts{0, 0, 0, 0, 0, 2, 2, 0});
}

// A reduced rank holds what it would in a job of such replicas alone.
void map_of_a_reduced_rank() {
  const RankLayouts unequal = layouts_of(listed(8, 2, 1));
  const RankLayouts alone = layouts_of(listed(8, 2, 2));
  for (int rank = 0; rank < 6; ++rank) {
    std::vector<Range> elements[2];
    for (const int other : {0, 1}) {
      table_of(other == 0 ? unequal : alone, rank)
          .for_each_run([&](const Weight&, const Parameter&, const RowRun& run, Range at) {
            elements[other].push_back(run.global);
            elements[other].push_back(at);
          });
    }
    CHECK(elements[0] == elements[1]);
  }
}

void init_without_spares() {
  Config off = listed(8, 0, 1);
  off.parallel.nonuniform = {};
  CHECK(sent_of(listed(8, 0, 1), 16) == sent_of(off, 16));
}

void init_of_attention_and_mlp() {
  const Config config = listed(8, 2, 1);
  for (const char* name : {"self_attn.q_proj.weight", "self_attn.o_proj.weight"}) {
    const std::vector<Counts> heads = shared_units(config, name, 24);
    CHECK(row_sums(heads) == Counts(8, 3));
    CHECK(column_sums(heads) == Counts(6, 4));
  }
  for (const char* name : {"mlp.gate_proj.weight", "mlp.down_proj.weight"}) {  // 128 blocks of 32 columns
    const std::vector<Counts> columns = shared_units(config, name, 4096);
    CHECK(row_sums(columns) == Counts(8, 512));
    CHECK(column_sums(columns) == Counts{704, 704, 672, 672, 672, 672});
  }
}

// There is no wrapper: AdamW itself, whose masters in fp32 are the values where the layers read them.
void optimizer_has_no_wrapper() {
  on_ranks_end_to_end([](const Config& config, ProcessGroups& groups) {
    const MockRun run(config, groups);
    const auto* values = run.state.parameters().flat_values().data<float>();
    int64_t owned = 0;
    for (const AdamW::OwnState& own : run.state.optimizer().own_states()) {
      CHECK(own.master.data<float>() == values + own.elements.begin);
      owned += own.elements.size();
    }
    owned = all_reduce_value(*groups.world, owned, ReduceOp::kSum);
    CHECK(owned == count_parameters(config).trained);
  });
}

// What the optimizer reads of a uniform run are its rows of the buckets, with nothing exchanged before.
void optimizer_without_spares() {
  const std::vector<Sent> sent = sent_of(listed(8, 0, 1), 16);
  CHECK(std::ranges::none_of(sent, exchanges_gradients));
  CHECK(sent.front().contains("data reduce_scatter"));
}

// No gradient is strided, also of weights that are cut by columns: these are stored transposed, so that ranks share
// one piece or none.
void gradients_are_contiguous() {
  const Config config = listed(8, 2, 1);
  const RankLayouts ranks = layouts_of(config);
  const ParameterTable& table = table_of(ranks, 0);
  for (const char* name : {"self_attn.o_proj.weight", "mlp.down_proj.weight"}) {
    const WeightId id = weight_with(table, name);
    CHECK(table.weight(id).parameters.front().transposed);
    const std::vector<SharedBlock> blocks = shared_rows(topology_of(plan_of(config)), ranks.tables(), {&id, 1});
    std::set<std::pair<int, int>> pairs;
    for (const SharedBlock& block : blocks) {
      CHECK(pairs.emplace(block.holders[0].world_rank, block.holders[1].world_rank).second);
    }
    CHECK(pairs.size() < 8 + 6);
  }
}

void contiguous_gradients_are_not_copied() {
  on_ranks_end_to_end([](const Config& config, ProcessGroups& groups) {
    const MockRun run(config, groups);
    const ParameterTable& table = run.state.parameters();
    for (const Weight& weight : table.weights()) {
      CHECK(weight.gradient.data<float>() == table.flat_gradients().data<float>() + weight.offset);
    }
  });
}

// The same classes: what is unequal is the ownership of rows.
void construction() {
  on_ranks_end_to_end([](const Config& config, ProcessGroups& groups) {
    const MockRun run(config, groups);
    for (const OwnedRows& own : run.state.ownership().owned_rows()) CHECK(own.parameter->counted());
    CHECK(groups.exchange->size() == 6);
  });
}

// Gradients are on their way before the backward pass is over, that is before anybody asks for them.
void backward_hook() {
  on_ranks_end_to_end([](const Config& config, ProcessGroups& groups) {
    auto wrapped = std::make_unique<WrappedCommunicator>(std::move(groups.exchange));
    int exchanged = 0;
    wrapped->tamper_with_all_to_all([&](const Tensor&) { ++exchanged; });
    groups.exchange = std::move(wrapped);
    MockRun run(config, groups);
    std::vector<Batch> batches = run.batches(0);
    const Batch last = std::move(batches.back());
    batches.pop_back();
    run.state.zero_gradients();
    for (const Batch& batch : batches) run.state.forward_backward(batch, 1.0f);
    CHECK(exchanged == 0);
    run.state.forward_backward(last, 1.0f, nullptr, TrainState::Turn::kLast);
    const int in_backward = exchanged;
    run.state.finish_gradients();
    CHECK(in_backward > 0);
    CHECK(exchanged == in_backward);
  });
}

// The size of what a layer puts out.
struct OutputShape : TensorSink {
  bool wants(std::string_view name) const override { return name == "hidden.0"; }
  void record(const std::string&, const Tensor& local, int64_t) override {
    shape.assign(local.shape().begin(), local.shape().end());
  }
  std::vector<int64_t> shape;
};

void eight_ranks() {
  const ReplicaPlan plan = plan_of(end_to_end());
  CHECK(plan.widths == Widths{2, 4});
  CHECK(std::ssize(plan.places) - plan.training_ranks() == 2);
  CHECK(shared_units(end_to_end(), "self_attn.q_proj.weight", 24) ==
        std::vector<Counts>{{6, 0}, {6, 0}, {0, 6}, {0, 6}});
  on_ranks_end_to_end([](const Config& config, ProcessGroups& groups) {
    CHECK(groups.tensor->size() == (groups.replica() == 0 ? 2 : 4));
    MockRun run(config, groups);
    OutputShape output;
    std::map<std::string, std::vector<float>> gradients;
    StepHooks hooks;
    hooks.sink = &output;
    hooks.gradients_complete = [&](const StepResult&) { gradients = collect_gradients(run.state, groups); };
    const StepResult result = run.train(0, hooks);
    CHECK(output.shape == std::vector<int64_t>{2 * 8, 24});
    CHECK(std::isfinite(result.loss));
    if (groups.world->rank() != 0) return;  // which has gathered them
    size_t parameters = 0;
    for (const Weight& weight : run.state.parameters().weights()) parameters += weight.parameters.size();
    CHECK(gradients.size() == parameters);
    for (const auto& [name, values] : gradients) {
      INFO(name);
      CHECK(std::ranges::any_of(values, [](float x) { return x != 0; }));
    }
  });
}

struct Case {
  int number;
  const char* name;
  void (*check)();
};
constexpr Case kCases[] = {
    {1, "parity helper, no failures", no_failures},
    {2, "parity helper, uniform failures", uniform_failures},
    {3, "parity helper, nonuniform failures", nonuniform_failures},
    {4, "active ranks by default", default_active_list},
    {5, "active ranks, explicit", explicit_active_list},
    {6, "parameter map, no spares", map_without_spares},
    {7, "parameter map, healthy rank", map_of_a_healthy_rank},
    {8, "parameter map, reduced rank", map_of_a_reduced_rank},
    {9, "initialisation, no spares", init_without_spares},
    {10, "initialisation, attention and MLP", init_of_attention_and_mlp},
    {11, "optimizer, attributes", optimizer_has_no_wrapper},
    {12, "optimizer, no spares", optimizer_without_spares},
    {13, "optimizer, strided gradient", gradients_are_contiguous},
    {14, "optimizer, contiguous gradient", contiguous_gradients_are_not_copied},
    {15, "data parallelism, construction", construction},
    {16, "data parallelism, backward hook", backward_hook},
    {17, "end to end on eight ranks", eight_ranks},
};

}  // namespace

TEST_CASE("Megatron-LM's cases of nonuniform tensor parallelism") {
  int number = 0;
  for (const Case& one : kCases) {
    REQUIRE(one.number == ++number);
    DYNAMIC_SECTION("case " << one.number << ": " << one.name) {
      one.check();
    }
  }
  CHECK(number == 17);
}

TEST_CASE("where no rank is missing the groups, calls and bytes of a step are those of a run without the keys") {
  const auto of_text = [](const std::string& keys) {
    const TemporaryFolder folder;
    const std::string text =
        "model: {vocab_size: 250, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: "
        "8, num_key_value_heads: 4, head_dim: 16}\ntrain: {steps: 1, sequence_length: 16, global_batch_size: 8}\n"
        "parallel: {tensor: 2, data: 2";
    return load_config(folder.write("c.yaml", text + keys + "}\n"), {});
  };
  for (const Reduction reduction : {Reduction::kFast, Reduction::kInvariant}) {
    const auto sent = [&](const std::string& keys, int launched) {
      Config config = of_text(keys);
      config.numerics.reduction = reduction;
      return sent_of(config, launched);
    };
    const std::vector<Sent> off = sent("", 4);
    CHECK(off.size() == 4);
    CHECK(std::ranges::none_of(off, exchanges_gradients));
    CHECK(sent(", nonuniform: {failed: []}", 4) == off);
    CHECK(sent(", nonuniform: {failed: [], tensor_widths: [], min_tensor: 1, batch: keep}", 4) == off);
    CHECK(sent(", nonuniform: {tp_spares: 0}", 4) == off);
    CHECK(sent(", nonuniform: {tensor_widths: [2, 2]}", 4) == off);
    CHECK(sent(", spare: 1, nonuniform: {failed: [dp0.tp1]}", 5) == off);
    const std::vector<Sent> unequal = sent(", nonuniform: {failed: [dp0.tp1]}", 4);
    CHECK(unequal.size() == 3);
    CHECK(std::ranges::all_of(unequal, exchanges_gradients));
  }
}
