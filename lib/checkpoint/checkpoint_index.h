#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tiles.h"
#include "core/error.h"
#include "core/input_file.h"

namespace invar {

class Hdf5Writer;

// A checkpoint is a folder:
//   shard_RRRRR.h5  what world rank R wrote; a rank without data writes none. Datasets are rectangles of logical
//                   tensors, f32, named TENSOR@first row,first column, each in one piece
//   index.h5        for h5py and other tools: a virtual dataset per logical tensor, the text `config`, and the rest of
//                   CheckpointInfo as attributes
//   index.bin       what invar reads in place of HDF5: all of CheckpointIndex, with a sum of its own (index_table.h)
// Every byte of the first two is covered by a sum in the third. Format 1 had no index.bin: its tables were datasets of
// index.h5, whose size and sum were in index.crc32, and no sum covered the descriptions in shards. In
// older checkpoints of either format the config, too, is an attribute.

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
  int64_t offset = 0;               // of its values in the rank's file, row-major
  std::vector<uint32_t> checksums;  // CRC-32 of each tile's values, row-major: strip by strip, left to right

  int64_t bytes() const { return rectangle.elements() * static_cast<int64_t>(sizeof(float)); }
};

struct ShardFile {
  int rank = 0;
  int64_t bytes = 0;
  uint32_t rest = 0;  // CRC-32 of the bytes that are no values, from first to last

  static std::string name_of(int rank) { return format("shard_{:05}.h5", rank); }
};

struct CheckpointIndex {
  int64_t version = 2;  // of the format
  CheckpointInfo info;
  int64_t hdf5_bytes = 0;            // of index.h5
  uint32_t hdf5_sum = 0;             // CRC-32 of it
  std::vector<StateTensor> tensors;  // name and shape
  std::vector<ShardFile> files;
  std::vector<StoredPiece> pieces;

  int64_t bytes() const;  // of all shards
};

std::string dataset_name(const StateTensor& tensor, const Rectangle& rectangle);

// CRC-32 of all bytes of the file outside of these ranges, which do not overlap.
uint32_t sum_beside(const InputFile& file, std::vector<Range> values);

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

// index.h5 and index.bin, and with them the size and sum of index.h5. The pieces must cover every element of every
// tensor once.
void write_index(const std::filesystem::path& folder, CheckpointIndex index);

// Of either format. Error{kData} if the index is missing, damaged, of another version, or says what cannot be.
CheckpointIndex read_index(const std::filesystem::path& folder);

// Error{kData} if it is missing or has another size.
std::shared_ptr<const InputFile> open_shard(const std::filesystem::path& folder, const ShardFile& file);

// Error{kData} if a shard is missing or has another size, or index.h5 is damaged.
void check_files(const std::filesystem::path& folder, const CheckpointIndex& index);

// Error{kind} that names `path` unless all that the index says fits together. Rectangles must cover each tensor once,
// tilings have as many sums as tiles, and places lie inside the files and apart from each other. Whatever is read by an
// index that passed stays in bounds.
void check_index(const CheckpointIndex& index, const std::string& path, ErrorKind kind = ErrorKind::kData);

}  // namespace invar
