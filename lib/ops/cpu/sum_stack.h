#pragma once

#include <algorithm>
#include <span>

#include "ops/sample_sums.h"
#include "ops/tree_sum.h"

namespace invar::ops::cpu {

// The sums that samples change, a few elements of each, until they are stored. For each sample in turn: begin(), its
// terms added to top(), finish().
class SumStack {
 public:
  static constexpr int64_t kElements = 256;  // at most; those of the sums in use stay in cache

  // element: their first, in the buffers.
  SumStack(std::span<const Tensor> buffers, int64_t element, int64_t n) : buffers_(buffers), element_(element), n_(n) {}

  void begin(const SamplePlace& place) {
    top_ = place.buffer;
    if (place.clears) {
      lowest_ = std::min(lowest_, top_);
      std::fill_n(sums_[top_], n_, 0.0f);
    } else {
      need(top_);
    }
  }
  float* top() { return sums_[top_]; }
  void finish(const SamplePlace& place) {
    for (int joins = place.joins; joins > 0; --joins, --top_) {
      need(top_ - 1);
      add_to(sums_[top_ - 1], sums_[top_]);
    }
  }
  void add(const SamplePlace& place, const float* term) {
    begin(place);
    add_to(top(), term);
    finish(place);
  }
  void store() const {
    for (int buffer = lowest_; buffer <= top_; ++buffer) std::copy_n(sums_[buffer], n_, at(buffer));
  }

 private:
  float* at(int buffer) const { return buffers_[static_cast<size_t>(buffer)].data<float>() + element_; }
  void need(int buffer) {
    if (buffer >= lowest_) return;
    lowest_ = buffer;
    std::copy_n(at(buffer), n_, sums_[buffer]);
  }
  void add_to(float* sum, const float* term) const {
#pragma omp simd
    for (int64_t i = 0; i < n_; ++i) sum[i] += term[i];
  }

  std::span<const Tensor> buffers_;
  int64_t element_, n_;
  int lowest_ = SumProgram::kMaxDepth, top_ = 0;
  float sums_[SumProgram::kMaxDepth][kElements];
};

}  // namespace invar::ops::cpu
