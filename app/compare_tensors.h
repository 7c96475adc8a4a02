#pragma once

#include <optional>
#include <string>
#include <vector>

#include "app/tensor_file.h"
#include "app/tolerance.h"

namespace invar::app {

// A tensor of A beside the tensor of that name of B.
struct TensorDifference {
  std::string name;
  std::vector<int64_t> shape;  // in A
  std::string mismatch;        // why there are no numbers: shapes or types that differ, no elements
  double max_abs = 0;
  double mean_abs = 0;
  double magnitude = 0;                // max |B|, of finite values
  double band = 0;                     // atol + rtol · magnitude, of integers 0
  std::vector<int64_t> first_outside;  // index of the first element outside the band; empty if none is
  Verdict verdict = Verdict::kEqual;
  std::optional<double> growth;  // hidden.N: mean_abs over that of hidden.(N − 1)

  // Inside, but zeros in the place of B would be too: the band says nothing.
  bool is_vacuous() const { return verdict == Verdict::kInside && magnitude <= band; }
};

// A position at which the two have different most likely tokens.
struct Flip {
  std::vector<int64_t> position;  // [sample, s]
  int64_t token_a = -1;
  int64_t token_b = -1;
  double gap_a = 0;  // between the largest and the second largest logit
  double gap_b = 0;
  double max_abs = 0;  // largest difference of a logit at the position
  // Two right results within the band may disagree here: both gaps are at most twice the band.
  bool near_tie = false;
};

struct LogitsDifference {
  int64_t positions = 0;
  std::vector<Flip> flips;  // real ones before near ties, then by the smaller gap, largest first
  double min_gap_a = 0;     // over all positions
  double min_gap_b = 0;
  double median_gap_a = 0;
  double median_gap_b = 0;
};

struct FileDifference {
  std::vector<TensorDifference> tensors;  // of the common names: ids, loss, activations from the first layer on, others
  std::vector<std::string> only_a;        // filled if both files are of one kind
  std::vector<std::string> only_b;
  std::string left_out_a;  // as TensorFile::describe_left_out()
  std::string left_out_b;
  std::optional<LogitsDifference> logits;  // if both have them, in one shape

  // No tensor is outside, none on one side only, and one at least says something: it is not vacuous.
  bool inside() const;
};

// Reads both in blocks of rows. Of files of one kind the dtypes must be equal too, of different kinds only integers
// must face integers. A tensor without elements is outside. Error{kConfig} if there is no common name.
FileDifference compare_tensors(const TensorFile& a, const TensorFile& b, const Tolerance& tolerance);

}  // namespace invar::app
