#pragma once

#include <compare>
#include <span>
#include <vector>

#include "ops/sample_sums.h"
#include "parallel/reduction_tree.h"

namespace invar {

// In what order the gradients of a step's samples are added, so that it depends neither on the data-parallel ranks nor
// on micro-batches: of B samples, logical worker w of W adds samples [w·B/W, (w + 1)·B/W) one after another, from zero;
// a tree over the workers adds their sums (reduction_tree.h). A rank holds a contiguous run of whole workers, and as
// many sums at once as its part of the tree needs.
class WorkerOrder {
 public:
  // samples: of each data rank, one after another; they come `micro_batch` at a time. Error{kConfig} if a rank's do not
  // begin where a worker's do.
  WorkerOrder(int64_t workers, int64_t batch, std::span<const Range> samples, int data_rank, int64_t micro_batch);

  // Of sums, each in its buffer. The first one is zero when a step begins; others are cleared by a worker that begins
  // there.
  using Place = ops::SamplePlace;
  // Of a sample's gradient. If that is addable, a worker of one sample adds it to its sibling's sum at once: the same
  // addition without a buffer between. sample: counted from this rank's first one of the step.
  const Place& of(int64_t sample, LeafKind gradient) const { return of({sample, sample + 1}, gradient).front(); }
  std::span<const Place> of(Range samples, LeafKind gradient) const {
    return std::span(gradient == LeafKind::kAddable ? addable_ : own_buffer_)
        .subspan(static_cast<size_t>(samples.begin), static_cast<size_t>(samples.size()));
  }

  // At once, at most: a place's buffer is below it.
  int sums() const { return program_.buffers; }
  // Buffers whose sums a micro-batch may leave to the next one, or to the end. Sums in those above begin and end within
  // a micro-batch. The same for either kind of gradient: after a sample's joins what is left is in the same buffer.
  int kept() const { return kept_; }
  // Who has which sums at the end of the step, in its first buffers.
  const TreePlan& plan() const { return plan_; }

 private:
  TreePlan plan_;
  LeafProgram program_;
  std::vector<Place> own_buffer_, addable_;
  int kept_;
};

// WorkerOrder::kept() and sums() of a rank with these samples of the batch, whole workers' as the class says.
struct SumCounts {
  int kept = 0;
  int sums = 0;
  auto operator<=>(const SumCounts&) const = default;
};
SumCounts count_sums(int64_t workers, int64_t batch, Range samples, int64_t micro_batch);

}  // namespace invar
