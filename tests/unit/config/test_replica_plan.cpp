#include "config/replica_plan.h"

#include <set>

#include "config/failed_slots.h"
#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

using Place = ReplicaPlan::Place;
using Widths = std::vector<int>;
using Samples = std::vector<int64_t>;
using Failed = std::vector<std::string>;

// A grid of slots, some of which have failed; a model that can be cut up to 16 ways.
Config grid(int tensor, int data, const Failed& failed = {}) {
  Config config = valid_config();
  config.model.num_attention_heads = config.model.num_key_value_heads = 16;
  config.parallel.tensor = tensor;
  config.parallel.data = data;
  config.parallel.nonuniform.failed = failed;
  config.train.global_batch_size = 16 * data;
  return config;
}

// Megatron-LM's form.
Config listed(int tp_base, int data, int spares, int reduced, const IntegerLists& lists = {}) {
  Config config = grid(tp_base, data);
  config.parallel.nonuniform.tp_base = tp_base;
  config.parallel.nonuniform.tp_spares = spares;
  config.parallel.nonuniform.num_reduced_tp_dp_ranks = reduced;
  config.parallel.nonuniform.non_active_ranks_per_dp = lists;
  return config;
}

Config widths(int tensor, const Widths& tensor_widths) {
  Config config = grid(tensor, 0);
  config.parallel.nonuniform.tensor_widths = tensor_widths;
  config.train.global_batch_size = 16 * std::ssize(tensor_widths);
  return config;
}

// Slots of a replica of the grid that train, in the order of their tensor ranks.
std::vector<int> live_slots(const ReplicaPlan& plan, int grid_replica) {
  std::vector<int> slots;
  for (const int rank : plan.training_order()) {
    const Place& place = plan.places[static_cast<size_t>(rank)];
    if (place.grid_replica == grid_replica) slots.push_back(place.grid_slot);
  }
  return slots;
}

void refuses_plan(const Config& config, int launched, const std::string& message, const std::string& hint,
                  const std::vector<HostSlot>& hosts = {}) {
  INFO("expected: " << message);
  require_error(ErrorKind::kConfig, {message}, {hint}, [&] { plan_replicas(config, launched, hosts); });
}

// What holds for every plan: a contiguous run of the training world for each replica, in the order of the grid.
void check_sound(const ReplicaPlan& plan, const Config& config, int launched) {
  REQUIRE(std::ssize(plan.places) == launched);
  REQUIRE(plan.samples.size() == plan.widths.size());
  const std::vector<int> order = plan.training_order();
  REQUIRE(std::ssize(order) == plan.training_ranks());
  CHECK(std::set<int>(order.begin(), order.end()).size() == order.size());
  size_t at = 0;
  int last_replica = -1;
  for (size_t replica = 0; replica < plan.widths.size(); ++replica) {
    CHECK(plan.samples[replica] > 0);
    CHECK(plan.samples[replica] % config.train.micro_batch_size == 0);
    int last_slot = -1;
    for (int tensor_rank = 0; tensor_rank < plan.widths[replica]; ++tensor_rank, ++at) {
      const Place& place = plan.places[static_cast<size_t>(order[at])];
      CHECK(place.replica == static_cast<int>(replica));
      CHECK(place.tensor_rank == tensor_rank);
      CHECK(place.grid_slot > last_slot);  // survivors keep their order
      last_slot = place.grid_slot;
      if (tensor_rank == 0) CHECK(place.grid_replica > last_replica);
      if (tensor_rank == 0) last_replica = place.grid_replica;
      CHECK(place.grid_replica == last_replica);
    }
  }
}

}  // namespace

TEST_CASE("without failures the plan is the grid") {
  Config config = grid(4, 2);
  const ReplicaPlan plan = plan_replicas(config, 8);
  CHECK(plan.widths == Widths{4, 4});
  CHECK(plan.samples == Samples{16, 16});
  CHECK(plan.batch() == 32);
  CHECK(plan.uniform());
  CHECK(plan.training_order() == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(plan.places[6] == Place{1, 2, 1, 2});
  CHECK(plan_remarks(config, plan).empty());
  check_sound(plan, config, 8);

  config.parallel.data = 0;
  config.parallel.spare = 3;
  const ReplicaPlan spare = plan_replicas(config, 11);
  CHECK(spare.widths == plan.widths);
  CHECK(spare.places[10] == Place{});
  CHECK(plan_remarks(config, spare) == std::vector<std::string>{"3 of 11 ranks idle"});
}

TEST_CASE("lists of failed slots become widths") {
  // As Megatron-LM's helper, but shorter lists are not filled up: widths may all differ.
  CHECK(failed_slots(listed(8, 2, 0, 1), 16, {}).empty());
  CHECK(plan_replicas(listed(8, 2, 0, 1), 16).uniform());
  CHECK(failed_slots(listed(8, 2, 2, 2, {{"0", {2, 5}}, {"1", {6, 7}}}), 16, {}) == std::set<int>{2, 5, 14, 15});
  CHECK(plan_replicas(listed(8, 2, 2, 2, {{"0", {2, 5}}, {"1", {6, 7}}}), 16).widths == Widths{6, 6});
  CHECK(failed_slots(listed(8, 2, 2, 2, {{"0", {2, 5}}, {"1", {1}}}), 16, {}) == std::set<int>{2, 5, 9});
  CHECK(plan_replicas(listed(8, 2, 2, 2, {{"0", {2, 5}}, {"1", {1}}}), 16).widths == Widths{6, 7});
  CHECK(plan_replicas(listed(8, 2, 2, 1, {{"0", {}}}), 16).widths == Widths{8, 8});

  // By default the first replicas lack the last slots.
  CHECK(live_slots(plan_replicas(listed(8, 2, 2, 1), 16), 0) == std::vector<int>{0, 1, 2, 3, 4, 5});
  CHECK(live_slots(plan_replicas(listed(8, 2, 2, 1), 16), 1).size() == 8);
  CHECK(plan_replicas(listed(8, 3, 2, 2), 24).widths == Widths{6, 6, 8});
  CHECK(live_slots(plan_replicas(listed(8, 2, 2, 1, {{"0", {2, 5}}}), 16), 0) == std::vector<int>{0, 1, 3, 4, 6, 7});
  // A key dp,cp,pp comes before dp.
  const Config both = listed(8, 2, 2, 2, {{"1", {3}}, {"1, 0, 0", {0, 7}}, {"0,0,0", {4}}});
  CHECK(live_slots(plan_replicas(both, 16), 1) == std::vector<int>{1, 2, 3, 4, 5, 6});
  CHECK(live_slots(plan_replicas(both, 16), 0) == std::vector<int>{0, 1, 2, 3, 5, 6, 7});

  Config unnamed = listed(8, 2, 2, 1);
  unnamed.parallel.nonuniform.tp_base = 0;
  CHECK(plan_replicas(unnamed, 16).widths == Widths{6, 8});
}

TEST_CASE("lists of failed slots that say nothing are refused") {
  const std::string key = "parallel.nonuniform.non_active_ranks_per_dp: ";
  refuses_plan(listed(8, 2, 2, 2, {{"1,2,0", {0, 7}}}), 16, key + "1,2,0 is no replica", "no context or pipeline");
  for (const char* name : {"", "x", "1,0", "-1", "1,0,0,0", "0,0,1"}) {
    refuses_plan(listed(8, 2, 2, 2, {{name, {0}}}), 16, key + name + " is no replica", "dp,cp,pp");
  }
  refuses_plan(listed(8, 2, 2, 1, {{"1", {0}}}), 16, "replica 1 is not among the first num_reduced_tp_dp_ranks = 1",
               "num_reduced_tp_dp_ranks to at least 2");
  refuses_plan(listed(8, 2, 2, 1, {{"0", {8}}}), 16, "replica 0 has no slot 8", "slots are 0 to 7");
  refuses_plan(listed(8, 2, 2, 1, {{"0", {-1}}}), 16, "replica 0 has no slot -1", "slots are 0 to 7");
  refuses_plan(listed(8, 2, 1, 1, {{"0", {1, 2}}}), 16, "lacks more slots than tp_spares = 1", "tp_spares to 2");
  refuses_plan(listed(8, 2, 9, 1), 16, "tp_spares = 9 must be 0 to 8", "at most 8");
  refuses_plan(listed(8, 2, 1, 3), 16, "num_reduced_tp_dp_ranks = 3 must be 0 to 2", "at most 2");
  Config config = listed(8, 2, 1, 1);
  config.parallel.nonuniform.tp_base = 4;
  refuses_plan(config, 16, "tp_base = 4 is not parallel.tensor = 8", "set parallel.tensor: 4, or remove tp_base");
  config = listed(8, 2, 1, 1);
  config.parallel.nonuniform.failed = {"dp0.tp1"};
  refuses_plan(config, 16, "three ways", "keep one");
  config = grid(8, 2, {"dp0.tp1"});
  config.parallel.nonuniform.tp_base = 8;
  refuses_plan(config, 16, "three ways", "keep one");
  config = widths(8, {8, 7});
  config.parallel.nonuniform.failed = {"dp0.tp1"};
  refuses_plan(config, 15, "three ways", "keep one");
}

TEST_CASE("tp_spares: 0 turns Megatron-LM's form off") {
  const auto off = [](auto... more) {
    return [=](Config& c) {
      c.parallel.tensor = c.parallel.nonuniform.tp_base = 2;
      c.parallel.nonuniform.num_reduced_tp_dp_ranks = 3;
      (more(c), ...);
    };
  };
  accepts(off());
  accepts(off([](Config& c) { c.parallel.data = 2; }));
  Config config = valid_config();
  off()(config);
  const ReplicaPlan plan = plan_replicas(config, 4);
  CHECK(plan.widths == Widths{2, 2});
  CHECK(is_whole_grid(config, plan));
  refuses(off([](Config& c) { c.parallel.nonuniform.tp_base = 4; }), "tp_base = 4 is not parallel.tensor = 2",
          "set parallel.tensor: 4, or remove tp_base");
  refuses(off([](Config& c) {
            c.parallel.nonuniform.non_active_ranks_per_dp = {{"0", {1}}};
          }),
          "non_active_ranks_per_dp = {\"0\": [1]} would be ignored with parallel.nonuniform.tp_spares: 0", "remove");
}

TEST_CASE("every pattern of failures leaves a sound plan") {
  for (int tensor = 1; tensor <= 6; ++tensor) {
    for (int pattern = 0; pattern < 1 << (2 * tensor); ++pattern) {
      Config config = grid(tensor, 2);
      int failures = 0;
      for (int slot = 0; slot < 2 * tensor; ++slot) {
        if ((pattern >> slot & 1) == 0) continue;
        ++failures;
        config.parallel.nonuniform.failed.push_back(format("dp{}.tp{}", slot / tensor, slot % tensor));
      }
      if (failures == 2 * tensor) {
        refuses_plan(config, failures, "no replica has 1 live ranks left", "start other ranks");
        continue;
      }
      INFO("tensor " << tensor << " pattern " << pattern);
      const ReplicaPlan all = plan_replicas(config, 2 * tensor);
      check_sound(all, config, 2 * tensor);
      CHECK(all.batch() == 32);
      CHECK(all.training_ranks() == 2 * tensor - failures);
      for (int slot = 0; slot < 2 * tensor; ++slot) {
        const Place& place = all.places[static_cast<size_t>(slot)];
        CHECK((place.replica < 0) == ((pattern >> slot & 1) == 1));
        CHECK(place.grid_replica == slot / tensor);
        CHECK(place.grid_slot == slot % tensor);
      }
      // Survivors alone come to the same replicas.
      const ReplicaPlan survivors = plan_replicas(config, 2 * tensor - failures);
      check_sound(survivors, config, 2 * tensor - failures);
      CHECK(survivors.widths == all.widths);
      CHECK(survivors.samples == all.samples);
      for (int replica : {0, 1}) CHECK(live_slots(survivors, replica) == live_slots(all, replica));
    }
  }
}

TEST_CASE("a batch of one share for each replica is planned after any failure") {
  for (const Reduction reduction : {Reduction::kFast, Reduction::kInvariant}) {
    for (const int tensor : {1, 2, 4}) {
      for (const int data : {2, 3, 4}) {
        for (int slot = 0; slot < tensor * data; ++slot) {
          Config config = grid(tensor, data, {format("dp{}.tp{}", slot / tensor, slot % tensor)});
          config.train.global_batch_size = 0;
          config.train.micro_batch_size = 3;
          config.numerics.reduction = reduction;
          if (reduction == Reduction::kInvariant) config.numerics.workers = data;
          INFO("tensor " << tensor << " data " << data << " without slot " << slot);
          const int survivors = tensor * data - 1;
          CHECK_NOTHROW(validate(config, survivors));
          const ReplicaPlan plan = plan_replicas(config, survivors);
          check_sound(plan, config, survivors);
          CHECK(plan.batch() == 3 * data);
          if (tensor > 1) CHECK(plan.samples == Samples(static_cast<size_t>(data), 3));
        }
      }
    }
  }
}

TEST_CASE("a replica with too few live ranks is left out") {
  Config config = grid(4, 3, {"dp1.tp0", "dp1.tp1", "dp2.tp3"});
  CHECK(plan_replicas(config, 12).widths == Widths{4, 2, 3});
  config.parallel.nonuniform.min_tensor = 3;
  const ReplicaPlan plan = plan_replicas(config, 12);
  CHECK(plan.widths == Widths{4, 3});
  CHECK(plan.places[6] == Place{-1, -1, 1, 2});
  CHECK(plan.places[8] == Place{1, 0, 2, 0});
  CHECK(plan.batch() == 48);
  check_sound(plan, config, 12);
  const std::vector<std::string> remarks = plan_remarks(config, plan);
  REQUIRE(remarks.size() == 2);
  CHECK(contains(remarks[0], "left out: replica 1 of 3, with fewer live ranks than"));
  CHECK(remarks[1] == "5 of 12 ranks idle");

  config.parallel.nonuniform.speeds = {1, 9, 0.5};  // the second number is of the replica that is left out
  CHECK(plan_replicas(config, 12).samples == Samples{32, 16});
  config.parallel.nonuniform.speeds = {1, 0.5};
  refuses_plan(config, 12, "parallel.nonuniform.speeds has 2 numbers for 3 replicas", "give 3");
  config.parallel.nonuniform.speeds = {1, 1, 0};
  refuses_plan(config, 12, "parallel.nonuniform.speeds = 0 must be above 0", "above 0");

  config.parallel.nonuniform.speeds = {};
  config.parallel.nonuniform.batch = BatchPolicy::kShrink;
  const ReplicaPlan shrunk = plan_replicas(config, 12);
  CHECK(shrunk.samples[0] == 16);
  CHECK(shrunk.samples[1] < 16);
  CHECK(contains(plan_remarks(config, shrunk).back(), "shrink makes the global batch"));

  config.parallel.nonuniform.failed = {"dp0.tp0", "dp0.tp1", "dp1.tp0", "dp1.tp1", "dp2.tp0", "dp2.tp1"};
  refuses_plan(config, 12, "no replica has 3 live ranks left", "lower parallel.nonuniform.min_tensor");
}

TEST_CASE("spares take failed slots in ascending order") {
  Config config = grid(4, 2, {"dp1.tp2", "dp0.tp3", "dp1.tp2"});
  config.parallel.spare = 1;
  const ReplicaPlan plan = plan_replicas(config, 9);
  CHECK(plan.widths == Widths{4, 3});
  CHECK(plan.places[8] == Place{0, 3, 0, 3});
  CHECK(plan.places[3] == Place{-1, -1, 0, 3});
  CHECK(plan.places[6] == Place{-1, -1, 1, 2});
  CHECK(plan.places[7] == Place{1, 2, 1, 3});
  CHECK(plan.training_order() == std::vector<int>{0, 1, 2, 8, 4, 5, 7});
  check_sound(plan, config, 9);
  CHECK_FALSE(is_whole_grid(config, plan));

  const ReplicaPlan survivors = plan_replicas(config, 7);  // the spare is the last one
  CHECK(survivors.widths == Widths{4, 3});
  CHECK(survivors.places[6] == Place{0, 3, 0, 3});
  CHECK(survivors.training_order() == std::vector<int>{0, 1, 2, 6, 3, 4, 5});

  config.parallel.spare = 3;
  const ReplicaPlan whole = plan_replicas(config, 11);
  CHECK(whole.uniform());
  CHECK(is_whole_grid(config, whole));
  CHECK(whole.samples == Samples{16, 16});
  CHECK(whole.training_order() == std::vector<int>{0, 1, 2, 8, 4, 5, 9, 7});
  CHECK(whole.places[10] == Place{});
}

TEST_CASE("the number of ranks must be that of the slots or of the survivors") {
  Config config = grid(4, 2, {"dp0.tp1", "dp0.tp1", "dp1.tp0"});
  config.parallel.spare = 1;
  refuses_plan(config, 8, "tensor · data + spare = 4 · 2 + 1 = 9 ranks, 7 without the 2 failed ones, but the job has 8",
               "start 9 ranks, of which the failed ones idle, or 7 survivors");
  config.parallel.data = 0;
  refuses_plan(config, 9, "parallel.data is auto", "before the failures");
  config.parallel.data = 2'000'000'000;
  refuses_plan(config, 9, "more than a job can have", "lower parallel.data");
}

TEST_CASE("failures are named by slot or by host") {
  std::vector<HostSlot> hosts;
  for (const char* host : {"node1", "node2.cluster"}) {
    for (int gpu = 0; gpu < 4; ++gpu) hosts.push_back({host, gpu});
  }
  hosts.push_back({"node3", 0});
  Config config = grid(4, 2, {"node2.cluster.gpu1", "dp1.tp1", "node1.gpu0"});
  config.parallel.spare = 1;
  CHECK(failed_slots(config, 9, hosts) == std::set<int>{0, 5});
  const ReplicaPlan plan = plan_replicas(config, 9, hosts);
  CHECK(plan.widths == Widths{4, 3});
  CHECK(plan.places[8] == Place{0, 0, 0, 0});

  config.parallel.nonuniform.failed.emplace_back("node3.gpu0");  // the spare too
  const ReplicaPlan fewer = plan_replicas(config, 9, hosts);
  CHECK(fewer.widths == Widths{3, 3});
  CHECK(fewer.places[8] == Place{});

  const auto refuses_entry = [&](const std::string& entry, const std::string& message, const std::string& hint) {
    Config other = grid(4, 2, {"dp0.tp0", entry});
    other.parallel.spare = 1;
    refuses_plan(other, 9, "parallel.nonuniform.failed: " + message, hint, hosts);
  };
  refuses_entry("dp2.tp0", "dp2.tp0 is not in the grid of parallel.data · tensor = 2 · 4 slots", "dp0.tp0 to dp1.tp3");
  refuses_entry("dp0.tp4", "dp0.tp4 is not in the grid", "dp0.tp0 to dp1.tp3");
  refuses_entry("node9.gpu0", "no rank was launched on node9.gpu0", "the hosts are node1, node2.cluster, node3");
  refuses_entry("node1.gpu4", "no rank was launched on node1.gpu4", "the hosts are node1");
  for (const char* entry : {"", "dp0", "dp0.tp", "tp1", "dp-1.tp0", "dp0.tp1x", ".gpu0", "node1.gpu", "node1", "5"}) {
    refuses_entry(entry, std::string(entry) + " names no slot", "write dp0.tp5");
  }
  Config unknown = grid(4, 2, {"node1.gpu0"});
  refuses_plan(unknown, 8, "the host of node1.gpu0 is only known in a job", "dp0.tp5");
  hosts.resize(7);
  refuses_plan(unknown, 7, "only known if all 8 ranks are launched, but the job has 7", "dp0.tp5", hosts);
}

TEST_CASE("widths say how many ranks each replica has") {
  const Config config = widths(8, {8, 7, 3});
  const ReplicaPlan plan = plan_replicas(config, 18);
  CHECK(plan.widths == Widths{8, 7, 3});
  CHECK(plan.batch() == 48);
  CHECK(plan.samples[0] > plan.samples[1]);
  CHECK(plan.samples[1] > plan.samples[2]);
  CHECK(plan.places[8] == Place{1, 0, 1, 0});
  CHECK_FALSE(plan.uniform());
  check_sound(plan, config, 18);
  CHECK(plan_replicas(widths(8, {7, 7}), 14).samples == Samples{16, 16});
  Config automatic = widths(4, {4, 3});
  automatic.train.global_batch_size = 0;
  automatic.train.micro_batch_size = 3;
  CHECK(plan_replicas(automatic, 7).batch() == 6);

  Config spare = widths(4, {4, 3});
  spare.parallel.spare = 2;
  CHECK(plan_replicas(spare, 9).places[8] == Place{});
  refuses_plan(spare, 7, "tensor_widths and parallel.spare come to 7 + 2 = 9 ranks, but the job has 7", "mpirun -n 9");
  refuses_plan(widths(7, {8, 7}), 15, "8 is not from 1 to parallel.tensor = 7, the ranks of a whole replica",
               "set parallel.tensor: 8");
  refuses_plan(widths(8, {8, 0}), 8, "0 is not from 1 to parallel.tensor = 8", "leave the replica out");
  Config three = widths(4, {4, 3});
  three.parallel.data = 3;
  refuses_plan(three, 7, "tensor_widths has 2 replicas, but parallel.data = 3", "set parallel.data: 2, or auto");
}

TEST_CASE("plans that differ have other hashes") {
  std::set<uint64_t> hashes;
  const auto add = [&](const Config& config, int launched) {
    CHECK(plan_replicas(config, launched).hash() == plan_replicas(config, launched).hash());
    CHECK(hashes.insert(plan_replicas(config, launched).hash()).second);
  };
  add(grid(4, 2), 8);
  add(grid(2, 4), 8);
  for (int slot = 0; slot < 4; ++slot) {
    const Config config = grid(4, 2, {format("dp0.tp{}", slot)});
    add(config, 8);
    if (slot == 0) add(config, 7);
  }
  add(widths(4, {4, 3}), 7);
  Config config = widths(4, {4, 3});
  config.train.global_batch_size = 40;
  add(config, 7);
}

TEST_CASE("nonuniform replicas are validated") {
  const auto fails = [](const Failed& failed, auto... more) {
    return [=](Config& c) {
      c.parallel.tensor = 4, c.parallel.data = 2, c.parallel.nonuniform.failed = failed;
      c.train.global_batch_size = 16;
      (more(c), ...);
    };
  };
  const auto invariant = [](Config& c) { c.numerics.reduction = Reduction::kInvariant; };
  accepts(fails({"dp0.tp1"}), 8);
  accepts(fails({"dp0.tp1"}), 7);
  accepts(fails({"dp0.tp1"}, invariant), 7);
  refuses(fails({"dp0.tp1"}), "8 ranks, 7 without the 1 failed ones, but the job has 6", "start 8 ranks", 6);
  refuses(fails({"dp9.tp1"}), "dp9.tp1 is not in the grid", "dp0.tp0", 8);
  // Widths need no parallel.uneven, but units enough.
  const auto by_width = [](const Widths& tensor_widths, auto... more) {
    return [=](Config& c) {
      c.parallel.tensor = 16, c.parallel.nonuniform.tensor_widths = tensor_widths, c.train.global_batch_size = 64;
      (more(c), ...);
    };
  };
  accepts(by_width({8, 7, 5}), 20);
  refuses(by_width({9, 8}), "a replica of 9 tensor ranks exceeds 8 query heads (model.num_attention_heads)",
          "use at most 8 tensor ranks", 17);
  accepts(by_width({4, 3}, invariant), 7);
  accepts(by_width({5, 4}, invariant), 9);
  refuses(by_width({9, 4}, invariant), "a replica of 9 tensor ranks exceeds 8 query heads",
          "use at most 8 tensor ranks", 13);
  refuses(by_width({4, 3}, invariant, [](Config& c) { c.numerics.leaves = 3; }),
          "a replica of 4 tensor ranks exceeds 3 leaves", "at most 3", 7);
  const auto sequence = [](Config& c) { c.parallel.sequence = true, c.train.sequence_length = 4; };
  accepts(by_width({4, 3}, sequence), 7);
  refuses(by_width({5, 4}, sequence), "shares 4 tokens of a micro-batch over 5 tensor ranks", "at least 5 tokens", 9);
  refuses(by_width({4, 3}, invariant, [](Config& c) { c.numerics.workers = 65; }), "numerics.workers", "worker", 7);
  refuses(by_width({4, 3}, invariant, [](Config& c) { c.numerics.workers = 128; }),
          "numerics.workers = 128 exceeds train.global_batch_size = 64", "at most 64", 7);

  // Keys that nothing would use.
  refuses([](Config& c) { c.parallel.nonuniform.min_tensor = 2; },
          "parallel.nonuniform.min_tensor = 2 would be ignored", "remove parallel.nonuniform.min_tensor");
  refuses([](Config& c) { c.parallel.nonuniform.batch = BatchPolicy::kShrink; },
          "parallel.nonuniform.batch = shrink would be ignored", "remove");
  refuses(
      [](Config& c) {
        c.parallel.nonuniform.speeds = {1, 0.5};
      },
      "parallel.nonuniform.speeds = [1, 0.5] would be ignored", "remove");
  refuses([](Config& c) { c.parallel.nonuniform.reshare = true; },
          "parallel.nonuniform.reshare = true would be ignored", "remove");
  refuses(by_width({4, 3}, [](Config& c) { c.parallel.nonuniform.min_tensor = 2; }),
          "parallel.nonuniform.min_tensor = 2 would be ignored with parallel.nonuniform.tensor_widths", "remove", 7);
  refuses(fails({"dp0.tp1"}, [](Config& c) { c.parallel.nonuniform.min_tensor = 5; }), "min_tensor = 5 must be 1 to 4",
          "at most 4", 8);

  const auto reshare = [&](int64_t every) {
    return by_width({4, 3}, [=](Config& c) {
      c.parallel.nonuniform.reshare = true;
      c.checkpoint.dir = "checkpoints", c.checkpoint.every = every;
    });
  };
  accepts(reshare(100), 7);
  refuses(reshare(0),
          "parallel.nonuniform.reshare: true shares the batch anew at a checkpoint, but checkpoint.every = 0",
          "set checkpoint.every", 7);
}

TEST_CASE("spare ranks are beside the grid") {
  const auto spare = [](int spares, int data = 0) {
    return [=](Config& c) { c.parallel.tensor = 2, c.parallel.data = data, c.parallel.spare = spares; };
  };
  accepts(spare(3), 7);
  accepts(spare(1, 2), 5);
  refuses(spare(1), "7 ranks beside parallel.spare = 1 cannot be cut", "start 3, 5, 7 … ranks (mpirun -n 9)", 8);
  refuses(spare(1, 2), "= 4, but the job has 3 ranks beside parallel.spare = 1", "start 5 ranks (mpirun -n 5)", 4);
  refuses(spare(4), "parallel.spare = 4 leaves none of 4 ranks to train", "lower parallel.spare", 4);
  refuses(spare(-1), "parallel.spare = -1 must be 0 to", "at least 0", 4);

  // A grid that spares made whole again is judged as one.
  const auto whole = [](int64_t batch, int tensor) {
    return [=](Config& c) {
      c.parallel.tensor = tensor, c.parallel.data = 2, c.parallel.spare = 1;
      c.parallel.nonuniform.failed = {"dp1.tp0"};
      c.train.global_batch_size = batch;
    };
  };
  accepts(whole(6, 4), 9);
  refuses(whole(5, 4), "train.global_batch_size = 5 is not a multiple of", "4 or 6", 9);
  refuses(whole(6, 3), "parallel.tensor = 3 does not divide 8 query heads", "parallel.uneven: true", 7);
}
