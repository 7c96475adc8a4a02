#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/parameter.h"

namespace invar {

// A logical tensor of a training state: a parameter's fp32 masters or one of its moments.
struct StateTensor {
  std::string name;            // in a checkpoint: "model/NAME", "optimizer/exp_avg/NAME", "optimizer/exp_avg_sq/NAME"
  std::vector<int64_t> shape;  // one or two dims
  bool transposed = false;     // as in Parameter: storage holds blocks of columns as rows
  int64_t column_block = 1;

  StateTensor() = default;
  StateTensor(const std::string& kind, const Parameter& parameter)
      : name(kind + "/" + parameter.name),
        shape(parameter.shape),
        transposed(parameter.transposed),
        column_block(parameter.column_block) {}

  int64_t rows() const { return shape[0]; }
  int64_t cols() const { return shape.size() == 1 ? 1 : shape[1]; }
};

// Rows of the unit-major form of a tensor and where this rank keeps them, fp32 in host memory.
struct StateRun {
  size_t tensor = 0;
  Range rows;
  float* values = nullptr;
};

// What a rank has of a state: the same tensors on every rank, and its own runs.
struct StatePart {
  std::vector<StateTensor> tensors;
  std::vector<StateRun> runs;
  std::shared_ptr<std::vector<float>> host_copy{};  // what the runs point into, if not the state itself
};

// Room for a copy of a state. Error{kFault} says how much was wanted if there is no memory for it.
void resize_copy(std::vector<float>& copy, int64_t elements);

// A rectangle of a logical tensor, row-major: the form in which tensors lie in files.
struct Rectangle {
  Range rows;
  Range cols;

  int64_t elements() const { return rows.size() * cols.size(); }
  bool operator==(const Rectangle&) const = default;
};
inline Rectangle intersect(const Rectangle& a, const Rectangle& b) {
  return {intersect(a.rows, b.rows), intersect(a.cols, b.cols)};
}

// Runs of one tensor that follow each other: one rectangle of the logical tensor, whose values are scattered in memory.
// It covers all columns, or all rows if the tensor is stored transposed.
class StateExtent {
 public:
  StateExtent(const StateTensor& tensor, std::vector<StateRun> runs);

  const StateTensor& tensor() const { return *tensor_; }
  size_t index() const { return runs_.front().tensor; }
  const Rectangle& rectangle() const { return rectangle_; }

  // Whether memory has all of the area, row-major as a file has it: whole rows, in pieces.
  bool holds_rows_of(const Rectangle& area) const {
    return !tensor_->transposed && area.cols == rectangle_.cols && intersect(area.rows, rectangle_.rows) == area.rows;
  }
  // Where these rows lie then.
  std::vector<std::span<float>> spans(Range rows) const;

  // From and to memory what lies inside `area`, whose values are row-major; the area may reach beyond the rectangle.
  void gather(const Rectangle& area, std::span<float> out) const;
  void scatter(const Rectangle& area, std::span<const float> values) const;

 private:
  template <class Copy>
  void for_each_piece(const Rectangle& area, Copy copy) const;
  template <class Move>
  void for_each_transposed(const Rectangle& area, Move move) const;

  const StateTensor* tensor_;
  std::vector<StateRun> runs_;
  Rectangle rectangle_;
};

// The part's runs, joined where they are neighbours in a tensor. `part` must outlive them.
std::vector<StateExtent> extents_of(const StatePart& part);

}  // namespace invar
