#pragma once

#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "checkpoint/checkpoint_index.h"
#include "core/input_file.h"

namespace invar {

// Reads a checkpoint at any layout: each rank the rectangles that it holds, from the shards that have them, by the
// places in its index and without HDF5. Every tile that is read is checked against its sum. Error{kData} names file and
// tensor, and then what was read into is of no use.
class CheckpointReader {
 public:
  // Opens and checks the index, and that all files are there with their sizes, which of many ranks one should do. Not
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

  // Fills the part's runs, with so many threads.
  void read(const StatePart& part, int threads = 1) const;
  // Rows of a tensor, row-major.
  void read_rows(const std::string& tensor, Range rows, std::span<float> out) const;
  // Reads every byte of every file and checks every sum.
  void verify(int threads = 1) const;

 private:
  struct OpenFile {
    int rank;
    std::shared_ptr<const InputFile> file;
  };
  // Tiles side by side in a strip of a piece, all of whose rows are read.
  struct Strip {
    const StoredPiece* piece;
    Rectangle area;             // on the tiles' borders
    const StateExtent* extent;  // for which it is read; null: for its sums alone
  };

  size_t find(const std::string& tensor) const;
  std::shared_ptr<const InputFile> shard(int rank) const;
  void add_strips(const StateExtent& extent, std::vector<Strip>& strips) const;
  static void add_strips(const StoredPiece& piece, const Rectangle& wanted, const StateExtent* extent,
                         std::vector<Strip>& strips);
  void read_strips(std::vector<Strip> strips, int threads) const;
  void read_ahead(const Strip& strip) const;
  void read_strip(const Strip& strip, std::vector<float>& buffer) const;
  void check_tiles(const Strip& strip, const StripSums& sums) const;
  void check_beside_values() const;

  std::filesystem::path folder_;
  CheckpointIndex index_;
  std::map<std::string, size_t> tensors_;
  std::vector<std::vector<size_t>> pieces_;  // of each tensor
  mutable std::mutex opening_;
  mutable std::list<OpenFile> open_;  // the last ones used, newest first
};

}  // namespace invar
