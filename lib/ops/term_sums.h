#pragma once

#include <span>
#include <vector>

#include "device/stream.h"

namespace invar::ops {

// Where a sample's gradient goes: it is added to the sum in `buffer`, which is made zero before if it clears; then
// `joins` times the buffer is added to the one below, and is of no more use until it is cleared.
struct SamplePlace {
  int buffer = 0;
  bool clears = false;
  int joins = 0;
};

// Vectors whose gradients are sums of rows of terms, sample by sample: which rows, and where the sums go.
class TermTable {
 public:
  struct Vector {
    int64_t first = 0;            // of its rows, in the list of all
    int64_t rows_per_sample = 0;  // one or more
    int64_t width = 0;
    int64_t into = 0;  // its first element in a gradient buffer
  };

  explicit TermTable(int64_t samples = 0) : samples_(samples) {}
  // rows: the first element of each among the terms: those of the first sample in the order in which they are added,
  // those of the second, ... Error{kFault} if they are not a whole number per sample, one or more.
  void add(int64_t width, int64_t into, std::span<const int64_t> rows);

  int64_t samples() const { return samples_; }
  const std::vector<Vector>& vectors() const { return vectors_; }
  int64_t widest() const { return widest_; }
  // Ends of what is read of the terms and written of a buffer.
  int64_t terms_end() const { return terms_end_; }
  int64_t buffer_end() const { return buffer_end_; }

  // As an operation takes it: the vectors, each as its fields, then the rows.
  int64_t packed_size() const { return kFields * std::ssize(vectors_) + std::ssize(rows_); }
  std::vector<int64_t> packed() const;

  static constexpr int64_t kFields = 4;

 private:
  int64_t samples_;
  std::vector<Vector> vectors_;
  std::vector<int64_t> rows_;
  int64_t widest_ = 0;
  int64_t terms_end_ = 0;
  int64_t buffer_end_ = 0;
};

// For each vector and each sample in turn: sum = ((row 0 + row 1) + row 2) + ..., added to the vector in the sample's
// buffer as its place says, each + one addition in fp32. terms f32 (n); packed i64: the table's, on the stream's
// device; places: of its samples; buffers: at most SumProgram::kMaxDepth, f32 of one length. Error{kFault} for rows,
// vectors or buffers that are not there.
void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   std::span<const SamplePlace> places, std::span<const Tensor> buffers);

// Of each sample in turn one term, added to its buffer as its place says, each + one addition in fp32. terms f32
// (S, ...); places: S, of which the first may be any and the others add to the buffer where the one before has left the
// last sum, or clear the next one; buffers: at most SumProgram::kMaxDepth, f32, each of as many elements as a term.
// What is left in a buffer that was joined is undefined.
void add_terms(const Stream& stream, const Tensor& terms, std::span<const SamplePlace> places,
               std::span<const Tensor> buffers);

}  // namespace invar::ops
