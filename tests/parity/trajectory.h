#pragma once

#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "awkward_models.h"
#include "comm/thread_communicator.h"
#include "mock_run.h"
#include "parallel/logical_tensor.h"
#include "train/copy_check.h"

namespace invar::test {

struct Trajectory {
  std::vector<double> losses;
  std::vector<double> norms;
  double validation = 0;
  std::map<std::string, std::vector<float>> initial;    // logical tensors
  std::map<std::string, std::vector<float>> gradients;  // of the first step
  std::map<std::string, std::vector<float>> trained;
  int64_t differing = 0;  // elements that some rank of any replica then holds with other bits
};

inline std::map<std::string, std::vector<float>> collect_all(const TrainState& state, const ProcessGroups& groups) {
  std::map<std::string, std::vector<float>> all;
  for (const Weight& weight : state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      all[parameter.name] =
          collect_logical(*groups.tensor, state.stream(), state.parameters().flat_values(), weight, parameter);
    }
  }
  return all;
}

// Complete gradients, from the ranks that own their rows.
inline std::map<std::string, std::vector<float>> collect_gradients(const TrainState& state,
                                                                   const ProcessGroups& groups) {
  std::map<std::string, std::vector<float>> all;
  for (const Weight& weight : state.parameters().weights()) {
    for (const Parameter& parameter : weight.parameters) {
      std::vector<RowRun> runs;
      std::vector<float> values;
      for (const OwnedRows& own : state.ownership().owned_rows()) {
        if (own.parameter != &parameter) continue;
        runs.push_back({own.rows, 0});
        const std::vector<float> part = read_f32(state.stream(), state.parameters().flat_gradients(), own.elements);
        values.insert(values.end(), part.begin(), part.end());
      }
      all[parameter.name] = collect_runs(*groups.world, state.stream(), parameter, runs, std::move(values));
    }
  }
  return all;
}

// Elements of this rank's values that do not have the bits of these logical tensors.
inline int64_t count_differing(const TrainState& state, const std::map<std::string, std::vector<float>>& logical) {
  int64_t differing = 0;
  state.parameters().for_each_run([&](const Weight&, const Parameter& parameter, const RowRun& run, Range elements) {
    const std::vector<float>& expected = logical.at(parameter.name);
    std::vector<float> held = expected;
    copy_run_to_logical(parameter, run, read_f32(state.stream(), state.parameters().flat_values(), elements), held);
    for (size_t i = 0; i < held.size(); ++i) {
      differing += std::bit_cast<uint32_t>(held[i]) != std::bit_cast<uint32_t>(expected[i]) ? 1 : 0;
    }
  });
  return differing;
}

inline Trajectory train(Config config, const Layout& layout, const std::function<void(ProcessGroups&)>& prepare = {}) {
  use_layout(config, layout);
  Trajectory trajectory;
  run_thread_ranks(layout.topology().world(), [&](Communicator& world) {
    ProcessGroups groups = make_process_groups(world, layout.topology());
    if (prepare) prepare(groups);
    MockRun run(config, groups);
    std::optional<CopyCheck> copies;
    if (!prepare) copies.emplace(run.state, groups, 0);
    auto initial = collect_all(run.state, groups);
    std::vector<double> losses;
    std::vector<double> norms;
    std::map<std::string, std::vector<float>> gradients;
    for (int64_t step = 0; step < config.train.steps; ++step) {
      StepHooks hooks;
      hooks.gradients_complete = [&](const StepResult&) {
        if (step == 0) gradients = collect_gradients(run.state, groups);
        if (!copies) return;
        copies->look();
        copies->look_at_masters();
      };
      const StepResult result = run.train(step, hooks);
      if (copies) copies->compare(step + 1);
      losses.push_back(result.loss);
      norms.push_back(result.grad_norm);
    }
    const double validation = run_evaluation(run.state, config, groups, run.data).value().loss.value();
    auto trained = collect_all(run.state, groups);
    const int64_t used = run.state.used().total();
    INVAR_CHECK(used == run.planned.total(), "{} bytes used, {} planned", used, run.planned.total());
    if (world.rank() == 0) {
      trajectory = {losses, norms, validation, std::move(initial), std::move(gradients), std::move(trained)};
    }
    world.barrier();
    const int64_t differing = all_reduce_value(world, count_differing(run.state, trajectory.trained), ReduceOp::kSum);
    if (world.rank() == 0) trajectory.differing = differing;
  });
  return trajectory;
}

inline double worst_weight_error(const Trajectory& a, const Trajectory& b) {
  double worst = 0;
  for (const auto& [name, values] : a.trained) {
    const auto& other = b.trained.at(name);
    for (size_t i = 0; i < values.size(); ++i) worst = std::max(worst, std::abs(double{values[i]} - other[i]));
  }
  return worst;
}

}  // namespace invar::test
