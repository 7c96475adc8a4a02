#pragma once

#include <span>
#include <vector>

#include "device/stream.h"
#include "ops/sample_sums.h"

namespace invar::ops {

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
// device; sums: of the table's samples, buffers f32 of one length. Error{kFault} for rows, vectors, places or buffers
// that are not there. What is left of the vectors in a buffer that was joined is undefined.
void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   const SampleSums& sums);

// Of each sample in turn one term, added to its buffer as its place says, each + one addition in fp32. terms f32
// (S, ...); sums: of S samples, buffers f32 of as many elements as a term. Error{kFault} for other places, buffers or
// sizes. What is left in a buffer that was joined is undefined.
void add_terms(const Stream& stream, const Tensor& terms, const SampleSums& sums);

}  // namespace invar::ops
