#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/hdf5_file.h"
#include "core/input_file.h"

// Where the values of an HDF5 file lie, read without the HDF5 library, which damaged files can crash. What is known is
// what Hdf5Writer writes, and h5py unless told otherwise. Files have superblock 0, and groups with symbol tables.
// Datasets have object headers 1, little-endian numbers or texts of fixed length, and contiguous storage in the file
// itself. A file of another form is refused; a dataset or an attribute of another form only where it is asked for.
namespace invar::hdf5 {

inline constexpr const char* kDamaged = "the file is damaged, was not copied whole, or is not an HDF5 file";

// Appended to a file of HDF5, which ends before it: this text, and the CRC-32 of all bytes that it follows.
inline constexpr std::string_view kSumText = "invar crc32 ";
inline constexpr int64_t kSumBytes = 16;

// The type of an element: a number, or text of `bytes` bytes.
struct ElementType {
  std::optional<DType> number;
  int64_t bytes = 0;
};

struct StoredDataset {
  ElementType type;
  std::vector<int64_t> shape;     // empty: a scalar
  int64_t elements = 0;           // of all dims; their bytes lie inside the file
  std::optional<int64_t> offset;  // in the file; none for a virtual dataset
  std::string refused{};          // why it is not read; then nothing else is known
};

struct StoredAttribute {
  std::optional<ElementType> type;  // none: of another kind
  int64_t elements = 0;
  std::vector<std::byte> value;
  std::string refused{};  // as of a dataset
};

struct Structure {
  std::map<std::string, StoredDataset> datasets;      // by path, without a slash at the beginning
  std::map<std::string, StoredAttribute> attributes;  // of the root
};

// Error{kData} names the file, and the group where one is at fault. Reads each description once: time and memory are
// bounded by the file's size, whatever it says. A sum after the HDF5 part must be that of the file.
Structure read_structure(const InputFile& file);

}  // namespace invar::hdf5
