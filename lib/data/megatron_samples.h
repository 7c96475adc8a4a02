#pragma once

#include <cstdint>
#include <vector>

namespace invar {

// Which tokens make sample k: the order of Megatron's GPTDataset, reproduced to the bit. Sequences are shuffled per
// epoch and laid end to end; every S tokens of that run begin a sample of S + 1; the samples are shuffled again. The
// last epoch is shuffled apart from the others when less than 80 % of it is needed. A last sample shorter than S + 1
// is dropped, as Megatron does by default, so that no sample is padded.
class MegatronSamples {
 public:
  // lengths: tokens of each sequence of the split. Error{kData} if there are none, or if the order would need more
  // than 2^31 − 1 entries; Error{kConfig} for a seed past 32 bits, which numpy refuses.
  MegatronSamples(std::vector<int32_t> lengths, int64_t sequence_length, int64_t samples_wanted, uint64_t seed);

  int64_t samples() const { return static_cast<int64_t>(shuffle_index_.size()); }  // at least samples_wanted

  // Tokens [offset, offset + count) of a sequence of the split. A sample is its pieces in order, S + 1 tokens in all.
  struct Piece {
    int32_t sequence;
    int32_t offset;
    int32_t count;

    bool operator==(const Piece&) const = default;
  };
  std::vector<Piece> pieces(int64_t sample) const;

  // Megatron's names: sequences in shuffled order; where each sample begins; the sample to take k-th.
  struct Start {
    int32_t entry;   // of document_index
    int32_t offset;  // in that sequence

    bool operator==(const Start&) const = default;
  };
  const std::vector<int32_t>& document_index() const { return document_index_; }
  const std::vector<Start>& sample_index() const { return sample_index_; }  // samples() + 1
  const std::vector<uint32_t>& shuffle_index() const { return shuffle_index_; }

 private:
  Start next_start(Start at) const;
  int32_t length_at(int32_t entry) const;

  std::vector<int32_t> lengths_;
  int64_t sequence_length_;
  std::vector<int32_t> document_index_;
  std::vector<Start> sample_index_;
  std::vector<uint32_t> shuffle_index_;
};

}  // namespace invar
