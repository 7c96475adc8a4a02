#include "parallel/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/exact_sum.h"
#include "device/device.h"
#include "ops/elementwise.h"

namespace invar {
namespace {

class FastNorm : public GradientNorm {
 public:
  FastNorm(const RowOwnership& ownership, Arena& arena) : squares_(arena.allocate("sum of squares", DType::kF64, {1})) {
    size_t block = 0;  // of the last one; they count from one
    for (const OwnedRows& own : ownership.owned_rows()) {
      const bool joins = own.block == block && counted_.back().end == own.elements.begin;
      block = own.block;
      if (!joins) counted_.push_back({own.elements.begin, own.elements.begin});
      counted_.back().end = own.elements.end;
    }
  }

  double of(const Stream& stream, const Tensor& flat_gradients, Communicator& world) const override {
    ops::zero(stream, squares_);
    for (const Range& own : counted_) {
      ops::add_sum_of_squares(stream, flat_gradients.rows(own.begin, own.end), squares_);
    }
    if (squares_.is_meta()) return 0;
    double total = 0;
    copy_across(stream, squares_, Tensor(&total, DType::kF64, DeviceType::kCpu, {1}));
    return std::sqrt(all_reduce_value(world, total, ReduceOp::kSum));
  }

 private:
  std::vector<Range> counted_;  // of the flat gradients, neighbours joined
  Tensor squares_;              // f64 (1)
};

class InvariantNorm : public GradientNorm {
 public:
  InvariantNorm(const RowOwnership& ownership, Arena& arena) {
    int64_t rows = 0;
    for (const OwnedRows& own : ownership.owned_rows()) {
      const int64_t cols = own.parameter->cols(), count = own.elements.size() / cols;
      rows += count;
      const bool joins =
          !counted_.empty() && counted_.back().end() == own.elements.begin && counted_.back().columns == cols;
      if (joins) {
        counted_.back().rows += count;
      } else {
        counted_.push_back({own.elements.begin, count, cols});
      }
    }
    squares_ = arena.allocate("sums of squares", DType::kF64, {rows});
    digits_ = arena.allocate("digits of their sum", DType::kI64, {ExactSum::kDigits});
  }

  double of(const Stream& stream, const Tensor& flat_gradients, Communicator& world) const override {
    ops::row_squares(stream, flat_gradients, counted_, squares_);
    ops::exact_sum(stream, squares_, digits_);
    if (digits_.is_meta()) return 0;
    std::array<int64_t, ExactSum::kDigits> digits;
    copy_across(stream, digits_, Tensor(digits.data(), DType::kI64, DeviceType::kCpu, {ExactSum::kDigits}));
    return std::sqrt(all_reduce_value(world, ExactSum::of_digits(digits)));
  }

 private:
  std::vector<ops::RowBlock> counted_;  // of the flat gradients, neighbours joined
  Tensor squares_;                      // f64 (rows of all counted)
  Tensor digits_;                       // i64 (ExactSum::kDigits)
};

}  // namespace

std::unique_ptr<GradientNorm> fast_norm(const RowOwnership& ownership, Arena& arena) {
  return std::make_unique<FastNorm>(ownership, arena);
}

std::unique_ptr<GradientNorm> invariant_norm(const RowOwnership& ownership, Arena& arena) {
  return std::make_unique<InvariantNorm>(ownership, arena);
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace invar
