// A model with awkward sizes, trained for a few steps at many layouts: losses, norms and weights are those of one rank.
#include <cmath>

#include "support/catch.h"
#include "trajectory.h"

using namespace invar;
using namespace invar::test;

namespace {

double mean_weight_error(const Trajectory& a, const Trajectory& b) {
  double sum = 0;
  double count = 0;
  for (const auto& [name, values] : a.trained) {
    const auto& other = b.trained.at(name);
    for (size_t i = 0; i < values.size(); ++i) sum += std::abs(double{values[i]} - other[i]);
    count += static_cast<double>(values.size());
  }
  return sum / count;
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> kLayouts = {{1, false, 1, 4},
                                               {1, false, 3, 2},
                                               {2, false, 1, 3},
                                               {2, true, 2, 2},
                                               {3, true, 1, 1},
                                               {3, false, 2, 3},
                                               {4, true, 1, 2},
                                               {5, true, 1, 4},
                                               {6, true, 1, 12},
                                               {6, false, 1, 2},
                                               {2, true, 1, 4, RecomputeKind::kFull},
                                               {4, false, 2, 1, RecomputeKind::kFull}};
  return kLayouts;
}

}  // namespace

TEST_CASE("fp32: every layout has the trajectory and the weights of one rank") {
  const Config config = awkward_model(Precision::kF32);
  const Trajectory one = train(config, {});
  CHECK(one.losses.back() != one.losses.front());
  for (const Layout& layout : layouts()) {
    INFO("tensor " << layout.tensor << " sequence " << layout.sequence << " data " << layout.data);
    const Trajectory other = train(config, layout);
    CHECK(other.initial == one.initial);  // to the bit
    for (size_t step = 0; step < one.losses.size(); ++step) {
      CHECK(std::abs(other.losses[step] - one.losses[step]) < 1e-5);
      CHECK(std::abs(other.norms[step] - one.norms[step]) < 1e-4);
    }
    CHECK(std::abs(other.validation - one.validation) < 1e-4);
    CHECK(worst_weight_error(one, other) < 1e-3);  // Adam's first steps have the size of lr = 1e-2
  }
}

TEST_CASE("what ends of documents change leaves every layout with one trajectory, another one than without them") {
  Config config = awkward_model(Precision::kF32);
  const Trajectory all = train(config, {});
  config.data.eod_id = 3;
  config.data.eod_mask_loss = GENERATE(false, true);
  config.data.reset_at_eod = GENERATE(false, true);
  if (!config.data.eod_mask_loss && !config.data.reset_at_eod) return;
  const Trajectory one = train(config, {});
  CHECK(std::abs(one.losses[0] - all.losses[0]) > 1e-5);
  CHECK(std::abs(one.validation - all.validation) > 1e-5);
  for (const Layout& layout : {Layout{1, false, 3, 2}, Layout{2, true, 2, 1}, Layout{3, true, 1, 4}}) {
    const Trajectory other = train(config, layout);
    for (size_t step = 0; step < one.losses.size(); ++step) {
      CHECK(std::abs(other.losses[step] - one.losses[step]) < 1e-5);
      CHECK(std::abs(other.norms[step] - one.norms[step]) < 1e-4);
    }
    CHECK(std::abs(other.validation - one.validation) < 1e-4);
  }
}

TEST_CASE("bf16: every layout stays in the band that bf16 rounding explains") {
  Config config = awkward_model(Precision::kBF16);
  const Trajectory one = train(config, {});
  const Trajectory exact = train(awkward_model(Precision::kF32), {});
  config.numerics.tensor_reduce_dtype = GENERATE(Precision::kF32, Precision::kBF16);
  const double of_norms = config.numerics.tensor_reduce_dtype == Precision::kF32 ? 0.02 : 0.04;
  for (const Layout& layout : layouts()) {
    INFO("tensor " << layout.tensor << " sequence " << layout.sequence << " data " << layout.data);
    const Trajectory other = train(config, layout);
    CHECK(other.initial == one.initial);
    for (size_t step = 0; step < one.losses.size(); ++step) {
      CHECK(std::abs(other.losses[step] - one.losses[step]) < 0.02);
      CHECK(std::abs(other.losses[step] - exact.losses[step]) < 0.03);
      CHECK(other.norms[step] == Approx(exact.norms[step]).epsilon(of_norms));
    }
    CHECK(mean_weight_error(exact, other) < 4e-3);  // the updates sum to about 4e-2
  }
}

TEST_CASE("terms of tensor ranks are rounded to tensor_reduce_dtype, where there are any") {
  const Config exact = awkward_model(Precision::kBF16);
  Config rounded = exact;
  rounded.numerics.tensor_reduce_dtype = Precision::kBF16;
  for (const Layout& layout : {Layout{1, false, 1, 2}, Layout{2, false, 1, 2}, Layout{2, true, 1, 2}}) {
    INFO("tensor " << layout.tensor << " sequence " << layout.sequence);
    CHECK((train(rounded, layout).losses == train(exact, layout).losses) == (layout.tensor == 1));
  }
}

TEST_CASE("recomputation changes no bit") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const Config config = awkward_model(precision);
    for (const bool sequence : {false, true}) {
      const Trajectory kept = train(config, {2, sequence, 1, 2});
      for (const RecomputeKind recompute : {RecomputeKind::kSelective, RecomputeKind::kFull}) {
        const Trajectory recomputed = train(config, {2, sequence, 1, 2, recompute});
        CHECK(kept.losses == recomputed.losses);
        CHECK(kept.trained == recomputed.trained);
      }
    }
  }
}

TEST_CASE("with lr = 0 and one batch, loss and gradient norm keep their bits over ten steps") {
  for (const int64_t micro_batch : {12, 3}) {  // accumulation 1 and 4
    Config config = awkward_model(Precision::kF32);
    config.optimizer.lr = 0;
    config.parallel.tensor = 2;
    config.train.micro_batch_size = micro_batch;
    run_thread_ranks(2, [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, {2, 1});
      MockRun run(config, groups);
      const std::vector<Batch> batches = run.batches(0);
      const StepResult first = run_step(run.state, config, groups, batches, 0);
      for (int64_t step = 1; step < 10; ++step) {
        const StepResult next = run_step(run.state, config, groups, batches, step);
        CHECK(next.loss == first.loss);
        CHECK(next.grad_norm == first.grad_norm);
      }
    });
  }
}

TEST_CASE("Gemma 4, fp32: every layout has the trajectory and the weights of one rank") {
  const Config config = awkward_gemma4(Precision::kF32);
  const Trajectory one = train(config, {});
  CHECK(one.losses.back() != one.losses.front());
  CHECK(one.trained.at("model.layers.2.layer_scalar") == std::vector<float>{1.0f});  // applied, not trained
  for (const Layout& layout : layouts()) {
    INFO("tensor " << layout.tensor << " sequence " << layout.sequence << " data " << layout.data);
    const Trajectory other = train(config, layout);
    CHECK(other.initial == one.initial);  // to the bit
    for (size_t step = 0; step < one.losses.size(); ++step) {
      CHECK(std::abs(other.losses[step] - one.losses[step]) < 2e-5);
      // Token 0 starts as a zero vector, whose norm's gradient is steep.
      CHECK(other.norms[step] == Approx(one.norms[step]).epsilon(1e-3));
    }
    CHECK(std::abs(other.validation - one.validation) < 1e-4);
    CHECK(mean_weight_error(one, other) < 1e-6);  // the updates sum to about 4e-3
  }
}

TEST_CASE("Gemma 4, bf16: every layout stays in the band that bf16 rounding explains") {
  const Config config = awkward_gemma4(Precision::kBF16);
  const Trajectory one = train(config, {});
  const Trajectory exact = train(awkward_gemma4(Precision::kF32), {});
  for (const Layout& layout : layouts()) {
    INFO("tensor " << layout.tensor << " sequence " << layout.sequence << " data " << layout.data);
    const Trajectory other = train(config, layout);
    CHECK(other.initial == one.initial);
    for (size_t step = 0; step < one.losses.size(); ++step) {
      CHECK(std::abs(other.losses[step] - exact.losses[step]) < 0.03);
      CHECK(other.norms[step] == Approx(exact.norms[step]).epsilon(step == 0 ? 0.03 : 0.1));
    }
    CHECK(mean_weight_error(exact, other) < 1e-3);
  }
}

TEST_CASE("Gemma 4: recomputation changes no bit") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    for (const bool sequence : {false, true}) {
      const Config config = awkward_gemma4(precision);
      const Trajectory kept = train(config, {4, sequence, 1, 2});
      for (const RecomputeKind recompute : {RecomputeKind::kSelective, RecomputeKind::kFull}) {
        const Trajectory recomputed = train(config, {4, sequence, 1, 2, recompute});
        CHECK(kept.losses == recomputed.losses);
        CHECK(kept.trained == recomputed.trained);
      }
    }
  }
}
