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

// Rows of a parameter that a rank owns.
struct OwnedRows {
  WeightId weight = 0;
  const Parameter* parameter = nullptr;
  Range rows;      // of the unit-major form
  Range elements;  // in the flat buffers
  size_t piece = 0;
  size_t block = 0;  // number of the block, from one, through all buckets
};

// Who owns which rows of the flat buffers among the ranks that hold the same (ZeRO-1), as one rank sees it. The buffers
// are cut into buckets of whole weights, the same on all ranks; replicated weights have buckets of their own, the first
// ones. A bucket is one block if the replicas are of one width; else as many as the cuts of all replicas together make.
// A block is cut, at row boundaries, into a contiguous piece for each replica in proportion to its ranks; where there
// are many, a rank has its share of all of them to about a row. Of rows that several ranks of a replica hold the first
// one's count (Parameter::counted), so that every row of the model has one owner.
class RowOwnership {
 public:
  // bucket_elements: of the logical tensors, so that all ranks of a tensor-parallel group cut after the same weights,
  // however unequal their shards; a weight with more has a bucket to itself.
  RowOwnership(const ParameterTable& table, int replicas, int replica, int64_t bucket_elements);
  // Replicas of unequal widths. tables: the layouts of all world ranks; table: this rank's own one.
  RowOwnership(const Topology& topology, std::span<const ParameterTable* const> tables, int world_rank,
               const ParameterTable& table, int64_t bucket_elements);

  struct Bucket {
    Range elements;
    std::vector<SharedBlock> blocks;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  size_t bucket_of(WeightId id) const { return bucket_of_[static_cast<size_t>(id)]; }
  int replica() const { return replica_; }  // this rank's

  // Where a block that counts begins in this rank's flat buffers; −1: another rank's counts.
  int64_t place(const Bucket& bucket, const SharedBlock& block) const;
  // This rank's part of a bucket in the sums over replicas: what it owns, and the padding and copies between.
  std::vector<Range> summed(size_t bucket) const;
  // Rows of one weight's storage that this rank owns, neighbours together.
  struct Piece {
    WeightId weight;
    Range elements;  // in the flat buffers
    size_t bucket;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }  // bucket by bucket
  // The same in logical coordinates, piece by piece: of every row of every parameter one rank of the world has it.
  const std::vector<OwnedRows>& owned_rows() const { return owned_rows_; }

 private:
  void cut_buckets(const ParameterTable& table, int64_t bucket_elements);
  void find_owned(const ParameterTable& table);
  void add_owned(const ParameterTable& table, WeightId id, Range elements, size_t bucket, size_t block);

  int replica_;
  int world_rank_ = -1;
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_of_;  // by weight
  std::vector<Piece> pieces_;
  std::vector<OwnedRows> owned_rows_;
};

}  // namespace invar
