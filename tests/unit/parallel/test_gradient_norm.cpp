#include "parallel/gradient_norm.h"

#include <cmath>

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

double norm_of(const std::unique_ptr<GradientNorm>& norm, const ParameterTable& table, const ProcessGroups& groups) {
  return norm->of(Stream(DeviceType::kCpu), table.flat_gradients(), *groups.world);
}

}  // namespace

TEST_CASE("the norm counts copies once and padding never, over any grid") {
  for (const Topology& grid : {Topology{1, 1}, Topology{2, 1}, Topology{1, 3}, Topology{2, 2}}) {
    run_thread_ranks(grid.world(), [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, grid);
      const int tensor_rank = groups.tensor->rank();
      Parameter matrix;  // 6 × 5, cut over the tensor group
      matrix.name = "w";
      matrix.shape = {6, 5};
      const int64_t rows = 6 / grid.tensor;
      matrix.runs = {{{tensor_rank * rows, (tensor_rank + 1) * rows}, 0}};
      Parameter norm;  // whole on every rank
      norm.name = "norm";
      norm.shape = {5};
      norm.runs = {{{0, 5}, 0}};
      norm.replicas = groups.tensor.get();
      ParameterTable table;
      Weight w;
      w.name = "w";
      w.rows = rows + 1;  // one padding row
      w.cols = 5;
      w.parameters = {matrix};
      table.add(w);
      Weight v;
      v.name = "norm";
      v.rows = 5;
      v.cols = 1;
      v.parameters = {norm};
      table.add(v);
      Arena values("values", DeviceType::kCpu, 1 << 16);
      Arena gradients("gradients", DeviceType::kCpu, 1 << 16);
      table.allocate(values, gradients, DType::kF32);
      const RowOwnership ownership(table, grid.data, groups.replica(), 1 << 20);
      for (float& x : table.flat_gradients().span<float>()) x = 2.0f;
      const double result = norm_of(fast_norm(ownership, gradients), table, groups);
      CHECK(result == Approx(2.0 * std::sqrt(35.0)).epsilon(1e-12));
      const double invariant = norm_of(invariant_norm(ownership, gradients), table, groups);
      CHECK(invariant == std::sqrt(140.0));

      // Of values so unlike that any other grouping of rows would round otherwise.
      double exact = 0;
      for (int i = 0; i < 30; ++i) exact += std::ldexp(1.0, 2 * (i % 7 * 4 - i / 5));
      for (int i = 0; i < 5; ++i) exact += std::ldexp(1.0, -40 - 2 * i);
      table.for_each_run([&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
        for (int64_t i = 0; i < elements.size(); ++i) {
          const auto at = static_cast<int>(run.global.begin * weight.cols + i);
          const int exponent = parameter.name == "w" ? at % 7 * 4 - at / 5 : -20 - at;
          table.flat_gradients().data<float>()[elements.begin + i] = std::ldexp(1.0f, exponent);
        }
      });
      const double of_unlike = norm_of(invariant_norm(ownership, gradients), table, groups);
      CHECK(of_unlike == std::sqrt(exact));
    });
  }
}

TEST_CASE("a copy that its record does not declare is counted twice: the record is what the norm goes by") {
  for (const bool declared : {true, false}) {
    run_thread_ranks(2, [&](Communicator& world) {
      const ProcessGroups groups = make_process_groups(world, {2, 1});
      Parameter norm;
      norm.name = "norm";
      norm.shape = {5};
      norm.runs = {{{0, 5}, 0}};
      norm.replicas = declared ? groups.tensor.get() : nullptr;
      Weight v;
      v.name = "norm";
      v.rows = 5;
      v.cols = 1;
      v.parameters = {norm};
      ParameterTable table;
      table.add(v);
      Arena values("values", DeviceType::kCpu, 1 << 12);
      Arena gradients("gradients", DeviceType::kCpu, 1 << 12);
      table.allocate(values, gradients, DType::kF32);
      const RowOwnership ownership(table, 1, 0, 1 << 20);
      for (float& x : table.flat_gradients().span<float>()) x = 2.0f;
      const double result = norm_of(fast_norm(ownership, gradients), table, groups);
      CHECK(result == Approx(2.0 * std::sqrt(declared ? 5.0 : 10.0)).epsilon(1e-12));
      const double invariant = norm_of(invariant_norm(ownership, gradients), table, groups);
      CHECK(invariant == std::sqrt(declared ? 20.0 : 40.0));
    });
  }
}

TEST_CASE("clip coefficient") {
  CHECK(clip_coefficient(0.5, 1.0) == 1.0);
  CHECK(clip_coefficient(2.0, 1.0) == Approx(1.0 / (2.0 + 1e-6)).epsilon(1e-12));
  CHECK(clip_coefficient(1e9, 0.0) == 1.0);
}
