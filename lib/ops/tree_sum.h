#pragma once

#include <array>
#include <cstdint>

#include "device/stream.h"

namespace invar::ops {

// A sum in a given order, as a postfix program: each term in turn is put on a stack of values, then `joins` times the
// two last values are replaced by their sum. One value remains. Its size is fixed, so that a kernel has it by value.
struct SumProgram {
  static constexpr int kMaxTerms = 1024;
  static constexpr int kMaxDepth = 24;  // values on the stack

  // Error{kFault} if the program is full.
  void add_term(int64_t row, int joins_after);

  int terms = 0;
  std::array<uint16_t, kMaxTerms> rows{};  // where a term lies, see tree_sum
  std::array<uint8_t, kMaxTerms> joins{};
};

// out[t][i] = the program's sum of terms[t][row][i], where a join is one addition in fp32. terms (T, rows, n), f32 or
// bf16; out (T, n), f32 or bf16, where the sum is rounded once more. Or without T: terms (rows, n) and out (n), which
// may be a row of terms. Error{kFault} for a program that needs rows that are not there, joins fewer than two values,
// or leaves more than one.
void tree_sum(const Stream& stream, const SumProgram& program, const Tensor& terms, const Tensor& out);

}  // namespace invar::ops
