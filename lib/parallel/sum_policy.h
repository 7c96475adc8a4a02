#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "config/contract.h"
#include "ops/matmul.h"
#include "parallel/gradient_norm.h"
#include "parallel/gradient_sink.h"
#include "parallel/head_cut.h"
#include "parallel/replica_sums.h"
#include "parallel/worker_order.h"

namespace invar {

// The product a · w over a dim K that the tensor group has cut: a (T, K of this rank), w (K of this rank, N), and its
// sum over the ranks. What it works in lies on the scratch that it was made with, and so does the sum.
class CutProduct {
 public:
  virtual ~CutProduct() = default;
  virtual void multiply(const Tensor& a, const Tensor& w) = 0;
  // Rows [first, first + n) of the product, from those (n, K of this rank) of `a`.
  virtual void multiply_rows(int64_t first, const Tensor& a, const Tensor& w) = 0;
  // (local tokens, N) of the activation dtype. Collective over the tensor group.
  virtual Tensor sum() = 0;
};

// Logits of n tokens over the vocabulary rows of this rank, and what a loss wants to know of them over all rows.
struct VocabularyLogits {
  Tensor logits;              // f32 (n, rows)
  Tensor labels;              // i32 (n)
  Range rows;                 // padded token ids of this rank
  int64_t vocab_size = 0;     // real ones
  Tensor maximum;             // f32 (n): written
  Tensor sum_exp_and_target;  // f32 (2, n): written: Σ exp(logit − maximum), and the label's logit
};

// Decides how every sum of a run is grouped: of matrix products, over cut dims, samples, replicas and in the gradient
// norm. Layers and the step say what is summed. Fast: as is fastest. Invariant: in an order that depends neither on the
// layout nor on micro-batches, so that results are the same to the bit (`numerics.reduction`).
class SumPolicy {
 public:
  SumPolicy() = default;
  SumPolicy(const SumPolicy&) = delete;
  SumPolicy& operator=(const SumPolicy&) = delete;
  virtual ~SumPolicy() = default;

  // --- How a model is cut, and where its gradients are kept ---

  virtual UnitCut cut(int64_t units, const Communicator& tensor) const = 0;
  virtual HeadCut cut_heads(int64_t query_heads, int64_t kv_heads, const Communicator& tensor) const = 0;
  // Tokens that sequence parallelism keeps on one rank; 0: it may cut anywhere.
  virtual int64_t token_block() const = 0;
  // Says that all ranks of `group` (null: this one alone) hold the parameter, and whether the layer on each of them
  // makes a part of its gradient, or all of it.
  virtual void set_copies(Parameter& parameter, Communicator* group, bool in_parts) const = 0;
  virtual GradientLayout gradient_layout() const = 0;

  // --- Within a layer ---

  // c = op(a) · op(b), a product over a dim that nobody cuts (ops::matmul).
  void multiply(const Stream& stream, const Tensor& a, ops::Transpose transpose_a, const Tensor& b,
                ops::Transpose transpose_b, const Tensor& c) const {
    ops::matmul(stream, a, transpose_a, b, transpose_b, c, 0.0f, numerics_);
  }
  const ops::Numerics& numerics() const { return numerics_; }
  virtual std::unique_ptr<CutProduct> product(const SumContext& ctx, const CutDim& dim, int64_t columns) const = 0;
  virtual void vocabulary_statistics(const SumContext& ctx, const CutDim& vocabulary,
                                     const VocabularyLogits& logits) const = 0;
  // out f32 (T, L) = sums of terms over the columns of all ranks. make(sums, parts) fills sums (parts, T, L), or (T, L)
  // without parts, with those over these ranges of this rank's columns.
  using ColumnSums = std::function<void(const Tensor& sums, std::span<const Range> parts)>;
  virtual void sum_columns(const SumContext& ctx, const CutDim& columns, const Tensor& out,
                           const ColumnSums& make) const = 0;
  // Tokens whose logits exist at a time, where `best` are best for the device.
  virtual int64_t head_chunk(const SumContext& ctx, int64_t best) const = 0;

  // --- Of a step ---

  virtual std::unique_ptr<GradientSink> gradients(const ParameterTable& table, GradientListener& listener) const = 0;
  virtual std::unique_ptr<ReplicaSums> over_replicas(const SyncContext& ctx) const = 0;
  // What it needs is allocated from `constants`.
  virtual std::unique_ptr<GradientNorm> norm(const RowOwnership& ownership, Arena& constants) const = 0;

  // Of a dry run: the device memory, in bytes, of the largest proof of a library's algorithm (ops::Numerics).
  int64_t proof_bytes() const { return proof_bytes_; }

 protected:
  mutable int64_t proof_bytes_ = 0;
  ops::Numerics numerics_;
};

std::unique_ptr<SumPolicy> fast_sums();
// samples: of a rank's step; none if no step is run (a layout alone). stream: of the run.
std::unique_ptr<SumPolicy> invariant_sums(const NumericsContract& contract, std::optional<WorkerOrder> samples,
                                          const Stream& stream);

}  // namespace invar
