#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tiles.h"

namespace invar {

class Hdf5Writer;

// A checkpoint is a folder:
//   shard_RRRRR.h5  what world rank R wrote; a rank without data writes none. Datasets are rectangles of logical
//                   tensors, f32, named TENSOR@first row,first column
//   index.h5        a virtual dataset per logical tensor, for h5py and other tools; the table by which invar reads the
//                   shards itself, with their sizes and checksums; the attributes of CheckpointInfo
//   index.crc32     size and CRC-32 of index.h5

// Where the run stands.
struct CheckpointInfo {
  int64_t step = 0;             // finished steps
  int64_t samples = 0;          // consumed: the position in the training data
  int64_t tokens = 0;           // trained on
  int64_t skipped_steps = 0;    // finished steps that changed nothing (train.on_nonfinite)
  bool evaluation_due = false;  // the evaluation after this step was broken off
  std::string config;           // YAML that load_config_text() reads without any other file
  std::string layout;           // for people: "tensor 2 with sequence parallelism x data 4"
  std::string contract;         // NumericsContract::text() of invariant numerics; empty with fast ones
  std::string contract_hash;    // of the contract

  bool operator==(const CheckpointInfo&) const = default;
};

// A rectangle of a logical tensor in a rank's shard.
struct StoredPiece {
  size_t tensor = 0;
  int rank = 0;
  Rectangle rectangle;
  Tiling tiling;
  std::vector<uint32_t> checksums;  // CRC-32 of each tile's values, row-major: strip by strip, left to right
};

struct ShardFile {
  int rank = 0;
  int64_t bytes = 0;

  static std::string name_of(int rank) { return format("shard_{:05}.h5", rank); }
};

struct CheckpointIndex {
  CheckpointInfo info;
  std::vector<StateTensor> tensors;  // name and shape
  std::vector<ShardFile> files;
  std::vector<StoredPiece> pieces;

  int64_t bytes() const;  // of all shards
};

std::string dataset_name(const StateTensor& tensor, const Rectangle& rectangle);

struct WrittenShard {
  ShardFile file;
  std::vector<StoredPiece> pieces;
};

// Writes one rank's shard. Error{kFault} names the file.
class ShardWriter {
 public:
  ShardWriter(const std::filesystem::path& folder, int rank);
  ~ShardWriter();

  // Holds one strip of a few MiB.
  void add(const StateExtent& extent);
  // The file is then complete and on disk.
  WrittenShard finish();

 private:
  std::filesystem::path path_;
  std::unique_ptr<Hdf5Writer> file_;
  WrittenShard shard_;
  std::vector<float> strip_;
};

// All of a rank's runs; no file if there are none.
WrittenShard write_shard(const std::filesystem::path& folder, int rank, const StatePart& part);

// index.h5 and index.crc32. The pieces must cover every element of every tensor once.
void write_index(const std::filesystem::path& folder, const CheckpointIndex& index);

// Error{kData} if the index is missing, damaged or of another version.
CheckpointIndex read_index(const std::filesystem::path& folder);

// Error{kData} if a shard is missing or has another size.
void check_shards(const std::filesystem::path& folder, const CheckpointIndex& index);

}  // namespace invar
