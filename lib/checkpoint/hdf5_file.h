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

// HDF5 files of plain datasets in the root group, and attributes of the root. Serial; one thread at a time in the whole
// process, as the library is built without locks.

struct Hdf5Info {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  // The dataset as a matrix: all dims but the last × the last. A vector is (n, 1).
  int64_t rows() const;
  int64_t cols() const;
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

  // A dataset of kF32, kF64, kI32 or kI64. The name has no "/".
  void create(const std::string& name, DType dtype, std::span<const int64_t> shape);
  // Rows [first_row, first_row + values.size() / cols) of the matrix view, each once; T is the dataset's type.
  template <class T>
  void write_rows(const std::string& name, int64_t first_row, std::span<const T> values);
  // A whole dataset at once.
  template <class T>
  void write(const std::string& name, std::span<const int64_t> shape, std::span<const T> values);

  void set_attribute(const std::string& name, const std::string& value);
  void set_attribute(const std::string& name, int64_t value);
  void set_attribute(const std::string& name, double value);

  // Checks that as many rows were written as there are, syncs, and renames.
  void finish();

 private:
  struct File;
  struct Slot {
    Hdf5Info info;
    int64_t rows_left = 0;
  };

  std::filesystem::path path_;
  std::unique_ptr<PendingFile> pending_;
  std::unique_ptr<File> file_;
  std::map<std::string, Slot> slots_;
};

// Opens a file for reading. Whatever is wrong with it (missing, truncated, not HDF5, no such dataset, a range that
// leaves it) throws Error{kData} that names file and dataset.
class Hdf5Reader {
 public:
  explicit Hdf5Reader(const std::filesystem::path& path);
  ~Hdf5Reader();
  Hdf5Reader(const Hdf5Reader&) = delete;
  Hdf5Reader& operator=(const Hdf5Reader&) = delete;

  std::vector<std::string> names() const;  // datasets of the root group, sorted
  bool contains(const std::string& name) const;
  Hdf5Info info(const std::string& name) const;

  // Rows of the matrix view into out of exactly that size, converted to T: float, double, int32_t or int64_t. Integers
  // are read from integers only.
  template <class T>
  void read_rows(const std::string& name, Range rows, std::span<T> out) const;
  // The whole dataset.
  std::vector<float> read_f32(const std::string& name) const;

  // Attributes of the root; nothing if there is none of that name, Error{kData} if it is of another type.
  std::optional<std::string> text_attribute(const std::string& name) const;
  std::optional<int64_t> integer_attribute(const std::string& name) const;
  std::optional<double> real_attribute(const std::string& name) const;

 private:
  struct File;

  std::filesystem::path path_;
  std::unique_ptr<File> file_;
};

}  // namespace invar
