#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/input_file.h"
#include "core/range.h"

namespace invar {

class PendingFile;

// The safetensors format: u64 little-endian header length N, N bytes of JSON that give each tensor's dtype, shape and
// byte range, then row-major data without gaps. A Hugging Face model is one such file, or several and an index.

struct SafetensorsInfo {
  std::string dtype;  // as in the file: "F32", "BF16", ...
  std::vector<int64_t> shape;
  std::string file;  // the file that holds it

  // The tensor as a matrix: dim 0 × all other dims. A vector is (n, 1), a scalar (1, 1), one without elements (0, 0).
  int64_t rows() const;
  int64_t cols() const;
};

// Reads a .safetensors file, or a Hugging Face folder: model.safetensors, or the shards that
// model.safetensors.index.json names. Of shards the index alone says which one a tensor is read from.
// A folder with both must hold the same weights twice. Names, dtypes and shapes are compared when it is opened, and
// bytes when they are read. So each value that is used is the same in both.
// Opening costs the headers only. Whatever is wrong with a file throws Error{kData} that names file and tensor; a
// reader that could be made has sound headers and all shards. Any number of threads may read.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path);

  bool contains(const std::string& name) const { return entries_.contains(name); }
  std::vector<std::string> names() const;                      // sorted
  const SafetensorsInfo& info(const std::string& name) const;  // unknown name: Error{kData}

  // The rectangle rows × cols of the matrix view, as fp32, row-major, into out of exactly that size. The tensor is
  // F32, BF16, F16 or F64 (rounded to nearest). Error{kData} if it is not, or if the rectangle leaves it.
  void read_rows(const std::string& name, Range rows, Range cols, std::span<float> out) const;
  // All elements of an I64 or I32 tensor.
  std::vector<int64_t> read_i64(const std::string& name) const;

 private:
  struct Place {
    std::shared_ptr<const InputFile> file;
    int64_t offset = 0;  // of the tensor's first byte
  };
  struct Entry {
    SafetensorsInfo info;
    Place place;
    Place copy;  // without a file unless the folder holds the tensor twice
  };
  using Entries = std::map<std::string, Entry>;

  static Entries open_file(const std::filesystem::path& path);
  static Entries open_shards(const std::filesystem::path& index_file);
  void add_copies(const Entries& shards);
  const Entry& find(const std::string& name) const;
  // Fills `out` with the tensor's bytes from `first` on.
  static void read_bytes(const std::string& name, const Entry& entry, int64_t first, std::span<std::byte> out);

  std::filesystem::path path_;
  Entries entries_;
};

// A tensor to be written. The dtype is kF32 or kBF16.
struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  int64_t bytes() const;
};

// Writes one .safetensors file. All tensors are declared at once, then their rows come in any order and any pieces.
// The file appears under its name only in finish(), complete and on disk; a writer that never gets there leaves
// nothing. System errors throw Error{kFault}. For one thread.
class SafetensorsWriter {
 public:
  // transformers loads only files whose metadata says {"format": "pt"}.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<SafetensorsSpec>& tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Rows [first_row, first_row + count) of the matrix view (see SafetensorsInfo), rounded to nearest even for bf16.
  // Each row is written once: a second time is a defect of the caller and throws.
  void write_rows(const std::string& name, int64_t first_row, int64_t count, std::span<const float> values);
  // Checks that each row of each tensor was written, syncs, and renames.
  void finish();

 private:
  struct Slot {
    DType dtype = DType::kF32;
    int64_t offset = 0;  // in the file
    int64_t rows = 0;
    int64_t cols = 0;
    std::map<int64_t, int64_t> written;  // begin → end of disjoint runs of rows, merged where they touch
  };

  static void mark_written(const std::string& name, Slot& slot, Range rows);

  std::filesystem::path path_;
  std::unique_ptr<PendingFile> file_;
  std::map<std::string, Slot> slots_;
};

// One file of a Hugging Face model folder.
struct HfShard {
  std::string file;
  std::vector<SafetensorsSpec> tensors;
};

// Cuts the tensors, in their order, into files of at most max_shard_bytes of data; a larger tensor gets a file of its
// own. One file is named model.safetensors, several model-00001-of-0000n.safetensors.
std::vector<HfShard> plan_hf_shards(const std::vector<SafetensorsSpec>& tensors, int64_t max_shard_bytes);

// Makes the folder ready for an export, at the start of a long run, so that a wrong path does not show only at its end.
// Weights of another model are not overwritten: old shards beside a new file would make a folder of two; those that
// claim_hf_folder() left for the same owner may be. Error{kConfig} names the folder as that which `key` gives.
void prepare_hf_folder(const std::filesystem::path& folder, const std::string& key, const std::string& owner = "");
// Right before the export: asks again, removes the owner's earlier model files, and marks the folder as the owner's, or
// as nobody's if that is empty.
void claim_hf_folder(const std::filesystem::path& folder, const std::string& key, const std::string& owner);

// Writes model.safetensors.index.json for several shards, whose files must be there: the index comes last, it makes the
// folder loadable. Nothing to write for one shard. Error{kData} if a model.safetensors lies there: loaders would
// prefer it to the shards.
void write_hf_index(const std::filesystem::path& folder, const std::vector<HfShard>& shards);

}  // namespace invar
