#pragma once

#include <string>
#include <vector>

#include "parallel/weight_provider.h"
#include "tree_values.h"

// Weights in fixed order and made-up gradients of samples, for tests of how they are summed.
namespace invar::test {

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

// A gradient for each of `count` tokens or samples of one use of a weight.
struct Gradients {
  Gradients(const ParameterTable& table, const WeightUse& weight_use, int64_t count)
      : use(weight_use),
        elements(table.weight(use.id).elements().size()),
        values(wide_values(count * elements, static_cast<unsigned>(10 * use.id + use.term))) {}

  void add(int64_t index, const Tensor& into) const {
    for (int64_t i = 0; i < elements; ++i) into.data<float>()[i] += values[static_cast<size_t>(index * elements + i)];
  }
  // The sums over each of `workers` equal runs of them, one after another from zero.
  Elements worker_sums(int64_t workers) const {
    const int64_t run = std::ssize(values) / elements / workers;
    Elements sums(static_cast<size_t>(workers * elements), 0.0f);
    for (int64_t index = 0; index < workers * run; ++index) {
      const Tensor sum = view_of(sums).rows(index / run * elements, (index / run + 1) * elements);
      add(index, sum);
    }
    return sums;
  }

  WeightUse use;
  int64_t elements;
  Elements values;
};

}  // namespace invar::test
