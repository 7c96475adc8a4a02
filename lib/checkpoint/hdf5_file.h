#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/range.h"

namespace invar {

class PendingFile;

// HDF5 files of plain datasets and attributes of the root. A "/" in a dataset's name makes groups. Any thread may write
// its own files: the library's calls of the process happen one after another.

struct Hdf5Info {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  // The dataset as a matrix: all dims but the last × the last. A vector is (n, 1).
  int64_t rows() const;
  int64_t cols() const;
};

// A dataset of another file, named relative to the folder of this one, that is shown as the rectangle [start, start +
// shape) of a virtual dataset.
struct Hdf5Source {
  std::string file;
  std::string dataset;
  std::vector<int64_t> start;
  std::vector<int64_t> shape;  // of the source
};

// Writes one file, which appears under its name only in finish(), complete and on disk; a writer that never gets there
// leaves nothing. Equal calls write equal bytes: there are no time stamps. System errors, a full disk among them, throw
// Error{kFault} that names file and dataset.
class Hdf5Writer {
 public:
  explicit Hdf5Writer(const std::filesystem::path& path);
  ~Hdf5Writer();
  Hdf5Writer(const Hdf5Writer&) = delete;
  Hdf5Writer& operator=(const Hdf5Writer&) = delete;

  // A dataset of kF32, kF64, kI32 or kI64.
  void create(const std::string& name, DType dtype, std::span<const int64_t> shape);
  // A dataset put together from others; what no source covers reads as zero, and so does a source that is not there.
  void create_virtual(const std::string& name, DType dtype, std::span<const int64_t> shape,
                      std::span<const Hdf5Source> sources);
  // Rows [first_row, first_row + values.size() / cols) of the matrix view, each once; T is the dataset's type.
  template <class T>
  void write_rows(const std::string& name, int64_t first_row, std::span<const T> values);
  // A whole dataset at once.
  template <class T>
  void write(const std::string& name, std::span<const int64_t> shape, std::span<const T> values);

  // A list of UTF-8 strings of one length, that of the longest, filled up with zeros.
  void write_strings(const std::string& name, std::span<const std::string> values);

  // Text of at most 64 KiB.
  void set_attribute(const std::string& name, const std::string& value);
  void set_attribute(const std::string& name, int64_t value);

  // Where the rows of a dataset lie in the file, once some are written.
  int64_t offset_of(const std::string& name);

  // Checks that as many rows were written as there are, syncs, and renames.
  void finish();
  // The same, with the sum of all bytes behind them, which Hdf5Reader checks and other programs do not see.
  void finish_with_sum();

 private:
  struct File;
  struct Slot {
    Hdf5Info info;
    int64_t rows_left = 0;
  };

  void create(const std::string& name, DType dtype, std::span<const int64_t> shape,
              std::span<const Hdf5Source> sources);
  void close();

  std::filesystem::path path_;
  std::unique_ptr<PendingFile> pending_;
  std::unique_ptr<File> file_;
  std::map<std::string, Slot> slots_;
};

// Reads a file without the HDF5 library (hdf5_structure.h says which files), so that damage ends in an Error and never
// in the library. Whatever is wrong with it (missing, truncated, not HDF5, no such dataset, a range that leaves it)
// throws Error{kData} that names file and dataset. Any number of threads may read.
class Hdf5Reader {
 public:
  // Reads all descriptions; of a dataset that is damaged or of another form the reason is told where it is asked for.
  // If finish_with_sum() wrote the file, all of it is summed.
  explicit Hdf5Reader(const std::filesystem::path& path);
  ~Hdf5Reader();
  Hdf5Reader(const Hdf5Reader&) = delete;
  Hdf5Reader& operator=(const Hdf5Reader&) = delete;

  std::vector<std::string> names() const;        // datasets of the root group, sorted
  bool contains(const std::string& name) const;  // of the root group
  Hdf5Info info(const std::string& name) const;
  // Where the values lie in the file: all of them, in one piece.
  int64_t offset_of(const std::string& name) const;
  int64_t file_size() const;

  // Rows of the matrix view into out of exactly that size, converted to T: float, double, int32_t or int64_t. Integers
  // are read from integers only.
  template <class T>
  void read_rows(const std::string& name, Range rows, std::span<T> out) const;
  std::vector<std::string> read_strings(const std::string& name) const;
  // The whole dataset.
  std::vector<float> read_f32(const std::string& name) const;

  // Attributes of the root; nothing if there is none of that name, Error{kData} if it is of another type or not one
  // value.
  std::optional<std::string> text_attribute(const std::string& name) const;
  std::optional<int64_t> integer_attribute(const std::string& name) const;

 private:
  struct File;

  std::unique_ptr<File> file_;
};

}  // namespace invar
