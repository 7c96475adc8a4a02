#pragma once

#include <span>
#include <vector>

#include "parallel/parameter.h"
#include "parallel/topology.h"

namespace invar {

// Rows that lie in one piece in the flat buffers of one rank of every replica, and which of these ranks owns which.
struct SharedBlock {
  struct Place {
    int world_rank = 0;
    int64_t begin = 0;  // first element in that rank's flat buffers
    bool operator==(const Place&) const = default;
  };
  struct Part {  // rows of a weight; between parts is padding
    WeightId weight = 0;
    int64_t begin = 0;  // within the block
    int64_t elements = 0;
  };
  std::vector<Place> holders;  // of each replica the rank whose gradient counts; none if all ranks are cut alike
  std::vector<Place> copies;   // on the other ranks that hold the rows
  std::vector<Part> parts;
  int64_t elements = 0;
  std::vector<int64_t> counts;  // elements that the rank of each replica owns, in replica order

  Range owned(int replica) const;  // within the block
};

// Who owns which rows of the flat buffers among the ranks that hold the same (ZeRO-1), as one rank sees it. The buffers
// are cut into buckets of whole weights, the same on all ranks; replicated weights have buckets of their own, the first
// ones. A bucket is one block if the replicas are of one width; else as many as the cuts of all replicas together make.
// A block is cut, at row boundaries, into a contiguous piece for each replica in proportion to its ranks; where there
// are many, a rank has its share of all of them to about a row.
class RowOwnership {
 public:
  // bucket_elements: of the logical tensors, so that all ranks of a tensor-parallel group cut after the same weights,
  // however unequal their shards; a weight with more has a bucket to itself.
  RowOwnership(const ParameterTable& table, int data_size, int data_rank, int64_t bucket_elements);
  // Replicas of unequal widths. tables: the layouts of all world ranks. Of rows that several ranks of a replica hold
  // the first one's count.
  RowOwnership(const Topology& topology, std::span<const ParameterTable* const> tables, int world_rank,
               int64_t bucket_elements);

  struct Bucket {
    Range elements;
    std::vector<SharedBlock> blocks;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  size_t bucket_of(WeightId id) const { return bucket_of_[static_cast<size_t>(id)]; }
  // Whether a row has one owner in all, not one in each tensor rank that holds a copy.
  bool exclusive() const { return world_rank_ >= 0; }
  int replica() const { return replica_; }  // this rank's

  // Where a block that counts begins in this rank's flat buffers; −1: another rank's counts.
  int64_t place(const Bucket& bucket, const SharedBlock& block) const;
  // What this rank owns of a bucket.
  std::vector<Range> owned(size_t bucket) const;
  // A run of rows of one weight that this rank owns.
  struct Piece {
    WeightId weight;
    Range elements;  // in the flat buffers
    size_t bucket;
  };
  std::vector<Piece> pieces() const;  // bucket by bucket

 private:
  void cut_buckets(const ParameterTable& table, int64_t bucket_elements);

  int replica_;
  int world_rank_ = -1;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // by weight
};

}  // namespace invar
