#pragma once

#include <random>
#include <string>
#include <vector>

#include "ops/embedding.h"
#include "parallel/gradient_sink.h"
#include "tree_values.h"

// Weights and made-up gradients of tokens, for tests of how they are summed.
namespace invar::test {

// Whose gradients are complete, in turn.
struct Done : GradientListener {
  void gradient_done(WeightId id) override { ids.push_back(id); }
  std::vector<WeightId> ids;
};

inline WeightId add_matrix(ParameterTable& table, const std::string& name, int64_t rows, int64_t cols) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = {rows, cols};
  parameter.runs = {{{0, rows}, 0}};
  Weight weight;
  weight.name = name;
  weight.rows = rows;
  weight.cols = cols;
  weight.parameters = {std::move(parameter)};
  return table.add(std::move(weight));
}

// Lookups of one use of a weight by `count` tokens, of any of its rows, and the gradients of what they looked up.
struct Gradients {
  Gradients(const ParameterTable& table, const WeightUse& weight_use, int64_t count)
      : use(weight_use),
        rows(table.weight(use.id).rows),
        elements(table.weight(use.id).elements().size()),
        values(wide_values(count * (elements / rows), static_cast<unsigned>(10 * use.id + use.user))) {
    std::mt19937 generator(static_cast<unsigned>(100 + 10 * use.id + use.user));
    for (int64_t i = 0; i < count; ++i) {
      tokens.push_back(static_cast<int32_t>(generator() % static_cast<unsigned>(rows)));
    }
  }

  void add(Range part, const ops::SampleSums& sums) {
    const Tensor gradients = view_of(values).view({std::ssize(tokens), elements / rows});
    ops::embedding_backward(Stream(DeviceType::kCpu), {}, view_of(tokens).rows(part.begin, part.end),
                            gradients.rows(part.begin, part.end), {0, rows}, sums);
  }
  // The sums over each of `workers` equal runs of them, one after another from zero.
  Elements worker_sums(int64_t workers) const {
    const int64_t run = std::ssize(tokens) / workers, columns = elements / rows;
    Elements sums(static_cast<size_t>(workers * elements), 0.0f);
    for (int64_t index = 0; index < workers * run; ++index) {
      const int64_t row = tokens[static_cast<size_t>(index)];
      for (int64_t c = 0; c < columns; ++c) {
        sums[static_cast<size_t>(index / run * elements + row * columns + c)] +=
            values[static_cast<size_t>(index * columns + c)];
      }
    }
    return sums;
  }

  WeightUse use;
  int64_t rows;
  int64_t elements;
  std::vector<int32_t> tokens;
  Elements values;
};

}  // namespace invar::test
