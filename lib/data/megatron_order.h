#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/sequence_lengths.h"

namespace invar {

// Where a sample begins.
struct SampleStart {
  int32_t entry;   // of document_index
  int32_t offset;  // in that sequence

  bool operator==(const SampleStart&) const = default;
};

// The order of Megatron's GPTDataset, reproduced to the bit. Sequences are shuffled per epoch and laid end to end;
// every S tokens of that run begin a sample of S + 1; the samples are shuffled again. The last epoch is shuffled apart
// from the others when less than 80 % of it is needed. A last sample shorter than S + 1 is dropped, as Megatron does by
// default, so that no sample is padded.
struct MegatronOrder {
  std::span<const int32_t> document_index;    // sequences in shuffled order
  std::span<const SampleStart> sample_index;  // where each sample begins, and where the last one ends
  std::span<const uint32_t> shuffle_index;    // the sample to take k-th
  std::shared_ptr<const void> memory;         // that the three lie in
};

// How many epochs an order lays out, and how many samples that makes.
struct OrderPlan {
  int64_t sequence_length = 0;
  uint32_t seed = 0;
  int64_t sequences = 0;
  int64_t epochs = 1;
  int64_t samples = 0;
  int64_t samples_before_last_epoch = 0;
  bool separate_last_epoch = false;

  int64_t entries() const { return epochs * sequences; }  // of document_index
};

// Enough epochs for samples_wanted; one if it is 0. Error{kData} if there are no tokens, or if the order would need
// more than 2^31 − 1 entries; Error{kConfig} for a seed past 32 bits, which numpy refuses.
OrderPlan plan_order(SequenceLengths lengths, int64_t sequence_length, int64_t samples_wanted, uint64_t seed);

MegatronOrder build_order(const OrderPlan& plan, SequenceLengths lengths);

// Tokens [offset, offset + count) of a sequence.
struct Piece {
  int32_t sequence;
  int32_t offset;
  int32_t count;

  bool operator==(const Piece&) const = default;
};

// The pieces of the sample to take k-th, `tokens` = S + 1 in all. Error{kData} if the order, which may come from a
// file, gives anything else.
std::vector<Piece> pieces_of(const MegatronOrder& order, SequenceLengths lengths, int64_t k, int64_t tokens);

}  // namespace invar
