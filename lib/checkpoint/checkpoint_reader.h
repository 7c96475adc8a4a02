#pragma once

#include <filesystem>
#include <list>
#include <map>
#include <memory>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/hdf5_file.h"

namespace invar {

// Reads a checkpoint at any layout: each rank the rectangles that it holds, from the shards that have them. Every value
// is checked against its tile's checksum before it is used. Error{kData} names file and tensor.
class CheckpointReader {
 public:
  // Opens and checks the index, and that all shards are there with their sizes, which of many ranks one should do. Not
  // collective.
  enum class Shards { kCheck, kTrust };
  explicit CheckpointReader(const std::filesystem::path& folder, Shards shards = Shards::kCheck);

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointIndex& index() const { return index_; }
  const CheckpointInfo& info() const { return index_.info; }
  bool contains(const std::string& tensor) const { return tensors_.contains(tensor); }

  // The checkpoint's tensors must be these, with these shapes, except that the moments may be missing altogether, as in
  // imported weights.
  void require(const std::vector<StateTensor>& tensors) const;
  bool has_moments() const;

  // Fills the part's runs.
  void read(const StatePart& part) const;
  // Rows of a tensor, row-major.
  void read_rows(const std::string& tensor, Range rows, std::span<float> out) const;
  // Reads everything and checks every sum.
  void verify() const;

 private:
  struct OpenFile {
    int rank;
    std::unique_ptr<Hdf5Reader> file;
  };

  size_t find(const std::string& tensor) const;
  const Hdf5Reader& shard(int rank) const;
  void read_extent(const StateExtent& extent) const;
  // The tiles of a piece that cover `area`, strip by strip, checked; use(strip area, values) gets each.
  template <class Use>
  void for_each_strip(const StoredPiece& piece, const Rectangle& area, Use use) const;
  void check_tiles(const StoredPiece& piece, const Rectangle& strip, std::span<const float> values) const;

  std::filesystem::path folder_;
  CheckpointIndex index_;
  std::map<std::string, size_t> tensors_;
  std::vector<std::vector<size_t>> pieces_;  // of each tensor
  mutable std::vector<float> strip_;         // what was read last
  mutable std::list<OpenFile> open_;         // the last ones used, newest first
};

}  // namespace invar
