#pragma once

#include "ops/elementwise.h"
#include "parallel/gradient_sync.h"

namespace invar {

// The ranges of the flat gradients whose squares this rank adds, neighbours joined: of every element of the model one
// copy on one rank.
std::vector<Range> counted_ranges(const ParameterTable& table, const RowOwnership& ownership);

// Global L2 norm, in fp64, of synchronised gradients, of which this rank counts the given ranges. squares f64 (1):
// scratch. Waits for the device. Collective over the world.
double gradient_norm(const Stream& stream, const Tensor& flat_gradients, const std::vector<Range>& counted,
                     Communicator& world, const Tensor& squares);

// The same in fixed order: the exact sum of the squares of each row, which no layout cuts. Counted are rows of the flat
// gradients.
struct RowSquares {  // scratch
  Tensor squares;    // f64 (rows of all counted)
  Tensor digits;     // i64 (ExactSum::kDigits)
};
std::vector<ops::RowBlock> counted_rows(const ParameterTable& table, const RowOwnership& ownership);
double gradient_norm(const Stream& stream, const Tensor& flat_gradients, const std::vector<ops::RowBlock>& counted,
                     Communicator& world, const RowSquares& scratch);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
double clip_coefficient(double norm, double max_norm);

}  // namespace invar
