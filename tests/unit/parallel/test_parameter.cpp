#include "parallel/parameter.h"

#include <cmath>

#include "comm/self_communicator.h"
#include "support/catch.h"

using namespace invar;

namespace {

Parameter matrix(const std::string& name, int64_t rows, int64_t cols, Range held, int64_t local = 0) {
  Parameter p;
  p.name = name;
  p.shape = {rows, cols};
  p.runs = {{held, local}};
  return p;
}

Weight weight_of(Parameter p, int64_t rows, int64_t cols) {
  Weight w;
  w.name = p.name;
  w.rows = rows;
  w.cols = cols;
  w.parameters = {std::move(p)};
  return w;
}

struct Memory {
  Arena values{"values", DeviceType::kCpu, 1 << 20};
  Arena gradients{"gradients", DeviceType::kCpu, 1 << 20};
};

}  // namespace

TEST_CASE("the zero row starts at zero, in every form of storage, and no other does") {
  const Stream stream(DeviceType::kCpu);
  struct Form {
    bool transposed;
    int64_t column_block;
  };
  for (const auto& [transposed, block] : {Form{false, 1}, Form{true, 1}, Form{true, 3}}) {
    Parameter p = matrix("w", 0, 0, {0, 0});
    p.shape = {10, 6};
    p.transposed = transposed;
    p.column_block = block;
    p.zero_row = 4;
    p.runs = {{{0, p.rows()}, 0}};
    const int64_t rows = p.rows(), cols = p.cols();
    Memory memory;
    ParameterTable table;
    table.add(weight_of(p, rows, cols));
    table.allocate(memory.values, memory.gradients, DType::kF32);
    initialise(table, stream, 7, 0.02);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        const bool zero = p.logical_index(row, col) / 6 == 4;
        CHECK((table.flat_values().data<float>()[row * cols + col] == 0.0f) == zero);
      }
    }
  }
}

TEST_CASE("initial weights do not depend on how a tensor is cut") {
  const Stream stream(DeviceType::kCpu, 2);
  for (const bool transposed : {false, true}) {
    const auto make = [&](Range held) {
      Parameter p = matrix("w", 10, 6, held);
      p.transposed = transposed;
      if (transposed) p.shape = {6, 10};
      return weight_of(p, held.size(), 6);
    };
    Memory whole_memory;
    ParameterTable whole;
    whole.add(make({0, 10}));
    whole.allocate(whole_memory.values, whole_memory.gradients, DType::kF32);
    initialise(whole, stream, 7, 0.02);
    for (const Range held : {Range{0, 3}, Range{3, 4}, Range{4, 10}}) {
      Memory memory;
      ParameterTable part;
      part.add(make(held));
      part.allocate(memory.values, memory.gradients, DType::kF32);
      initialise(part, stream, 7, 0.02);
      for (int64_t i = 0; i < held.size() * 6; ++i) {
        CHECK(part.flat_values().data<float>()[i] == whole.flat_values().data<float>()[held.begin * 6 + i]);
      }
    }
  }
}

TEST_CASE("initial weights depend on seed, name and the logical element, and have the asked spread") {
  const Stream stream(DeviceType::kCpu);
  const auto values = [&](uint64_t seed, const std::string& name, bool transposed) {
    Memory memory;
    ParameterTable table;
    Parameter p = matrix(name, 64, 64, {0, 64});
    p.transposed = transposed;
    table.add(weight_of(p, 64, 64));
    table.allocate(memory.values, memory.gradients, DType::kF32);
    initialise(table, stream, seed, 0.5);
    const auto span = table.flat_values().span<float>();
    return std::vector<float>(span.begin(), span.end());
  };
  const auto base = values(1, "a", false);
  CHECK(base != values(2, "a", false));
  CHECK(base != values(1, "b", false));
  const auto stored_transposed = values(1, "a", true);
  for (size_t row = 0; row < 64; ++row) {
    for (size_t col = 0; col < 64; ++col) CHECK(stored_transposed[col * 64 + row] == base[row * 64 + col]);
  }
  double sum = 0;
  double squares = 0;
  for (const float x : base) {
    sum += x;
    squares += double{x} * x;
  }
  CHECK(std::abs(sum / 4096) < 4 * 0.5 / 64);
  CHECK(std::sqrt(squares / 4096) == Approx(0.5).epsilon(0.05));
}

TEST_CASE("norm weights lie together at the beginning and start at one") {
  const auto self = make_self_communicator();
  Memory memory;
  ParameterTable table;
  const auto add_norm = [&](const std::string& name, bool partial) {
    Parameter p;
    p.name = name;
    p.shape = {5};
    p.init = Init::kOnes;
    p.runs = {{{0, 5}, 0}};
    p.replicas = self.get();
    p.partial_gradient = partial;
    return table.add(weight_of(p, 5, 1));
  };
  const WeightId partial = add_norm("q_norm", true);
  const WeightId complete = add_norm("norm", false);
  const WeightId dense = table.add(weight_of(matrix("w", 3, 4, {0, 3}), 3, 4));
  table.allocate(memory.values, memory.gradients, DType::kF32);
  CHECK(table.weight(dense).offset == 128);
  CHECK(table.weight(complete).offset == 64);
  CHECK(table.weight(partial).offset == 0);
  initialise(table, Stream(DeviceType::kCpu), 1, 0.02);
  CHECK(table.weight(partial).value.span<float>()[4] == 1.0f);
}

TEST_CASE(
    "a second user of a weight has gradients of its own in each buffer if the layout says so, a third is refused") {
  for (const bool separate : {false, true}) {
    Memory memory;
    ParameterTable table;
    const WeightId plain = table.add(weight_of(matrix("plain", 3, 4, {0, 3}), 3, 4));
    const WeightId tied = table.add(weight_of(matrix("tied", 5, 4, {0, 5}), 5, 4));
    const WeightUse second = table.add_user(tied);
    CHECK(second == WeightUse(tied, 1));
    CHECK(table.weight(tied).users == 2);
    table.allocate(memory.values, memory.gradients, DType::kF32, {2, separate});
    REQUIRE(table.gradient_buffers() == 2);
    CHECK(table.flat_gradients().raw() == table.gradients(0).raw());
    CHECK(table.flat_gradients().numel() == table.flat_size());
    CHECK(table.weight(plain).second_user == -1);
    CHECK((table.weight(tied).second_user >= table.flat_size()) == separate);
    CHECK((table.weight(tied).second_user == -1) == !separate);
    if (separate) {
      float number = 0;
      for (int buffer = 0; buffer < 2; ++buffer) {
        for (const WeightUse& use : {WeightUse(plain), WeightUse(tied), second}) {
          CHECK(table.gradient(use, buffer).dim(0) == table.weight(use.id).rows);
          CHECK(table.gradient(use, buffer).dim(1) == 4);
          for (float& x : table.gradient(use, buffer).span<float>()) x = number;
          ++number;
        }
      }
      number = 0;
      for (int buffer = 0; buffer < 2; ++buffer) {  // none has written to another's
        for (const WeightUse& use : {WeightUse(plain), WeightUse(tied), second}) {
          for (const float x : table.gradient(use, buffer).span<float>()) CHECK(x == number);
          ++number;
        }
      }
    }
    CHECK_THROWS_AS(table.add_user(tied), Error);
  }
}

TEST_CASE("rows that do not fit their weight are a defect") {
  ParameterTable table;
  CHECK_THROWS_AS(table.add(weight_of(matrix("w", 10, 6, {0, 4}, 7), 10, 6)), Error);
  CHECK_THROWS_AS(table.add(weight_of(matrix("w", 10, 6, {8, 12}), 10, 6)), Error);
  CHECK_THROWS_AS(table.add(weight_of(matrix("w", 10, 6, {0, 10}), 10, 5)), Error);
}
