#pragma once

#include <map>
#include <span>
#include <vector>

#include "ops/term_sums.h"
#include "parallel/parameter.h"
#include "parallel/sum_context.h"

namespace invar {

// The gradients of vectors (norms) in invariant numerics, all at once. In a micro-batch's backward pass layers write
// the rows of terms that each is a sum of: a row for each block of tokens of a sample, for each head, or for each
// sample (Weight::vector). At its end ranks exchange what others need of them in one gather, and one operation adds
// them to the gradient buffers, sample by sample (ops::add_term_sums).
class VectorSums {
 public:
  // Of the table's vectors; it outlives this.
  explicit VectorSums(const ParameterTable& table) : table_(table) {}

  // For the region's tokens, whole samples. Takes from ctx.scratch, until finish(), the terms of all ranks (for each
  // token block, 64 in a sample, 4 bytes an element of every norm: 58 MiB of Qwen3-0.6B at 4 samples, 292 MiB of
  // Qwen3-8B) and the table of their rows. ctx.region outlives that too.
  void begin(const SumContext& ctx);
  // Where the layer adds this rank's rows, f32, zero before: (token blocks of the local tokens, width),
  // (heads held, samples, width) or (samples, width).
  Tensor terms(WeightId id) const;
  int64_t samples() const { return tokens_ / sequence_length_; }
  // places: of the samples. Collective over the region's group.
  void finish(const Stream& stream, std::span<const ops::SamplePlace> places);

 private:
  // A vector's rows: units one after another, each the row of a token block or of a sample, or the rows of a head.
  struct Units {
    std::vector<int64_t> counts;  // of each rank; a single one: this rank has all
    int64_t rows = 1;             // of a unit
    int64_t per_sample = 1;       // units with a row of a given sample
  };
  // What this rank writes.
  struct Own {
    int64_t first = 0;  // element of the terms
    int64_t units = 0;
    int64_t rows = 1;  // of a unit
  };
  Units units_of(const VectorSum& sum) const;
  void lay_out(const TensorRegion& region, int64_t sequence_length);
  std::vector<int64_t> place_all(std::vector<int64_t> next);
  void place_vector(WeightId id, std::vector<int64_t>& next);
  Tensor part(size_t index) const { return terms_.rows(begins_[index], begins_[index + 1]); }

  const ParameterTable& table_;
  const TensorRegion* region_ = nullptr;
  int64_t tokens_ = 0;
  int64_t sequence_length_ = 1;
  std::vector<int64_t> begins_;  // of parts of the terms: each rank's that all need; those that only this one needs
  std::map<WeightId, Own> own_;
  ops::TermTable rows_;
  std::vector<int64_t> packed_rows_;

  // Of the micro-batch under way.
  Tensor terms_;
  Tensor device_rows_;
};

}  // namespace invar
