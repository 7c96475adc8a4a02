#pragma once

#include <memory>

#include "device/arena.h"
#include "parallel/row_ownership.h"

namespace invar {

// Global L2 norm, in fp64, of the synchronised gradients: of every element of the model the owner's counts.
class GradientNorm {
 public:
  virtual ~GradientNorm() = default;
  // Waits for the device. Collective over the world.
  virtual double of(const Stream& stream, const Tensor& flat_gradients, Communicator& world) const = 0;
};

// Squares are added in the order that is fastest. Scratch of both is allocated from `arena`.
std::unique_ptr<GradientNorm> fast_norm(const RowOwnership& ownership, Arena& arena);
// The exact sum of the sums of squares of each row, which no layout cuts, rounded once.
std::unique_ptr<GradientNorm> invariant_norm(const RowOwnership& ownership, Arena& arena);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
double clip_coefficient(double norm, double max_norm);

}  // namespace invar
