#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "core/range.h"

namespace invar {

// A sum over a dim that tensor parallelism cuts, in `units` that stay whole: all matrix products and other sums that
// contract this dim are cut alike.
struct SumSite {
  std::string name;            // for people: "FFN blocks"
  std::string key;             // the model's key that fixes the units
  int64_t units = 0;           // of the whole model
  bool may_be_uneven = false;  // ranks may hold unequal runs of units without parallel.uneven
  int64_t parts = 1;           // query heads of a unit: runs of them are leaves where units are too few

  // Runs of a unit that are leaves, and leaves in all, with that many of numerics.leaves.
  int64_t runs(int64_t wanted) const;
  int64_t leaves(int64_t wanted) const;
};
// Of every kind of layer of a valid model, in a fixed order.
std::vector<SumSite> sum_sites(const ModelConfig& model);

// Blocks of tokens of a sample in the gradients of norms, at most.
inline constexpr int64_t kTokenBlocks = 64;

// Elements of logits that exist at a time, at most, unless one token has more.
inline constexpr int64_t kHeadChunkElements = int64_t{320} << 20;

// The constants that fix the sums of numerics.reduction: invariant. Two runs of the same model, data and recipe have
// equal bits if their contracts are equal, at any layout, with the same invar. Nothing in it depends on layout or
// micro-batches.
struct NumericsContract {
  // To be raised with every change to the bits of an invariant run: tests/parity/test_golden_trajectory.cpp has them.
  int version = 2;
  Precision precision = Precision::kBF16;
  std::string arithmetic;  // of matrix products, and where: "fma-chain" on CPUs, "fma-chain-sm90", "mma-k16-sm90"
  std::string attention;   // on GPUs: "cudnn-9.19.0" if a layer may take it from cuDNN, else "own"; empty on CPUs
  // A sum over a site is the fixed tree (parallel/reduction_tree.h) of min(leaves, units) leaves: runs of units as even
  // as can be, the longer ones first. A rank holds whole leaves. Of KV heads there may be more: see head_runs.
  int64_t leaves = 0;
  // Worker w of W adds the samples [w B / W, (w + 1) B / W) of the global batch B one after another; a tree adds the
  // workers.
  int64_t workers = 0;
  int64_t token_block = 0;        // tokens of a block; divides the sequence length
  int64_t head_chunk_tokens = 0;  // tokens of a sample whose logits exist at a time; divides the sequence length
  // Runs into which the query heads of a KV head are cut (config/units.h), in the layers where they are most. From two
  // on each run is a leaf: of the sums over heads, where the KV head itself is one more, and of its gradient.
  int64_t head_runs = 1;
  // What leaves of sums of activations and their gradients, of which a rank may have a single one (LeafCut), are
  // rounded to before they are added.
  Precision tensor_reduce_dtype = Precision::kF32;

  // A line "key value" per field, in the order above; none for attention if it is empty, head_runs if it is 1 and
  // tensor_reduce_dtype if it is fp32.
  std::string text() const;
  // Of the text; 16 lower-case hex digits.
  std::string hash() const;
  // In one line, for people: "0123456789abcdef: version 2, precision bf16, ..."
  std::string describe() const;

  bool operator==(const NumericsContract&) const = default;
};

// Of matrix products on a GPU of such an architecture ("sm90"), or on a CPU (empty). In fp32 both are chains of fused
// multiply-adds.
std::string arithmetic_of(Precision precision, std::string_view architecture);

// The contract of a config that passed validation.
NumericsContract numerics_contract(const Config& config, std::string arithmetic, std::string attention = "");

// Tokens of a block for a sequence of that many; validation refuses a length that is no multiple of its block.
int64_t token_block_of(int64_t sequence_length);

// The largest divisor n of the sequence length for which n tokens have at most kHeadChunkElements logits, or 1.
int64_t head_chunk_tokens_of(int64_t sequence_length, int64_t vocab_size);

// The first sample of a worker.
constexpr int64_t first_sample(int64_t worker, int64_t workers, int64_t batch) {
  return worker * batch / workers;
}

// Workers that begin in these samples.
Range workers_within(Range samples, int64_t workers, int64_t batch);
// Those of the batch / data samples of a data rank.
Range workers_of(int64_t data_rank, int64_t data, int64_t workers, int64_t batch);

// Whether the samples of each of `data` ranks begin with a worker, so that each holds whole ones.
bool begins_with_workers(int64_t data, int64_t workers, int64_t batch);

struct ContractDifference {
  std::string field;
  std::string saved;  // "none" if the other contract alone has the field
  std::string now;
};
// The first field in which two texts differ; none if they are equal.
std::optional<ContractDifference> first_difference(std::string_view saved, std::string_view now);

}  // namespace invar
