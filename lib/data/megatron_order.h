#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "data/stored_array.h"

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
struct OrderArrays {
  std::vector<int32_t> document_index;    // sequences in shuffled order
  std::vector<SampleStart> sample_index;  // where each sample begins, and where the last one ends
  std::vector<uint32_t> shuffle_index;    // the sample to take k-th
};

// The same where it is read from, in memory or in files.
struct MegatronOrder {
  StoredArray<int32_t> document_index;
  StoredArray<SampleStart> sample_index;
  StoredArray<uint32_t> shuffle_index;
};

MegatronOrder in_memory(OrderArrays arrays);

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
OrderPlan plan_order(const StoredArray<int32_t>& lengths, int64_t sequence_length, int64_t samples_wanted,
                     uint64_t seed);

// Holds the lengths in memory too while it builds.
OrderArrays build_order(const OrderPlan& plan, const StoredArray<int32_t>& lengths);

// Where the tokens of the sample to take k-th lie, `tokens` = S + 1 in all, one run after another. tokens_of tells
// where each of the `sequences` lies. Error{kData} if the order, which may come from a file, gives anything else.
std::vector<Range> runs_of(const MegatronOrder& order, int64_t sequences,
                           const std::function<Range(int64_t)>& tokens_of, int64_t k, int64_t tokens);

}  // namespace invar
