#include "parallel/weight_store.h"

#include <cmath>
#include <optional>

#include "ordered_table.h"
#include "parallel/poisoned_weights.h"
#include "support/catch.h"

using namespace invar;

namespace {

// A layer that sums a weight's elements, and may keep the tensor when it has given its handle back.
class Summing {
 public:
  Summing(WeightId weight, bool keeps) : weight_(weight), keeps_(keeps) {}

  float forward(WeightStore& store) {
    std::optional<HeldWeight> held(store.use(weight_, Pass::kForward));
    const Tensor value = held->value();
    if (keeps_) held.reset();
    float sum = 0;
    for (const float x : value.span<float>()) sum += x;
    return sum;
  }

 private:
  WeightId weight_;
  bool keeps_;
};

struct Model {
  Model() {
    first = test::add_matrix(table, "first", 4, 3);
    second = test::add_matrix(table, "second", 2, 3);
    table.allocate(values, gradients, DType::kF32);
    for (float& x : table.flat_values().span<float>()) x = 1;
  }

  Stream stream{DeviceType::kCpu};
  Arena values{"values", DeviceType::kCpu, 1 << 12}, gradients{"gradients", DeviceType::kCpu, 1 << 12};
  ParameterTable table;
  WeightId first = 0, second = 0;
};

struct Awaited : ValueSource {
  void await_values(WeightId id) override { ids.push_back(id); }
  std::vector<WeightId> ids;
};

}  // namespace

TEST_CASE("a layer that keeps a weight past its handle computes NaN where weights are poisoned") {
  Model model;
  PoisonedWeights poisoned(model.table, nullptr, model.stream);
  CHECK(Summing(model.first, false).forward(poisoned) == 12);
  CHECK(std::isnan(Summing(model.first, true).forward(poisoned)));
  CHECK(Summing(model.second, false).forward(poisoned) == 6);  // each use finds the values anew
  CHECK(Summing(model.first, false).forward(poisoned) == 12);
  for (const float x : model.table.flat_values().span<float>()) CHECK((x == 1 || x == 0));  // its own are untouched
  ResidentWeights resident(model.table);
  CHECK(Summing(model.first, true).forward(resident) == 12);
}

TEST_CASE("a weight that is held twice is poisoned when the last handle ends") {
  Model model;
  PoisonedWeights poisoned(model.table, nullptr, model.stream);
  std::optional<HeldWeight> outer(poisoned.use(model.first, Pass::kBackward));
  const Tensor value = outer->value();
  {
    const HeldWeight inner = poisoned.use(model.first, Pass::kForward);
    CHECK(inner.value().raw() == value.raw());
    const HeldWeight other = poisoned.use(model.second, Pass::kForward);
    CHECK(other.value().raw() != value.raw());
  }
  CHECK(value.span<float>()[0] == 1);
  HeldWeight moved = std::move(*outer);
  outer.reset();
  CHECK(value.span<float>()[0] == 1);
  { const HeldWeight last = std::move(moved); }
  CHECK(std::isnan(value.span<float>()[0]));
}

TEST_CASE("a use waits for the weight's new values") {
  Model model;
  Awaited source;
  ResidentWeights resident(model.table, &source);
  (void)resident.use(model.second, Pass::kForward);
  (void)resident.use(model.first, Pass::kBackward);
  CHECK(source.ids == std::vector<WeightId>{model.second, model.first});
  PoisonedWeights poisoned(model.table, &source, model.stream);
  (void)poisoned.use(model.second, Pass::kForward);
  CHECK(source.ids.size() == 3);
}
