#pragma once

#include <hdf5.h>

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/hdf5_file.h"
#include "core/error.h"
#include "core/unique_handle.h"

// The HDF5 library as hdf5_writer.cpp uses it; nothing else includes its header.
namespace invar::hdf5 {

template <auto Close>
using Id = UniqueHandle<hid_t, Close, hid_t{H5I_INVALID_HID}>;
using FileId = Id<H5Fclose>;
using DatasetId = Id<H5Dclose>;
using SpaceId = Id<H5Sclose>;
using TypeId = Id<H5Tclose>;
using AttributeId = Id<H5Aclose>;
using PropertyId = Id<H5Pclose>;

// The library may be built without locks, and a checkpoint is written by a thread of its own: every call happens under
// this one lock. Reentrant, because the destructor of an object may run inside a call.
class Lock {
 public:
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// What the library says of its last failure, at the place where it came up. The next call, a close among them, forgets
// it.
std::string last_error();

[[noreturn]] void fail_writing(const std::filesystem::path& file, const std::string& name, const std::string& what,
                               const std::string& reason = last_error(),
                               std::source_location where = std::source_location::current());

// Without locks on files, which a cluster's file system may refuse: a run's folder has a lock of its own.
PropertyId file_access();

hid_t file_type(DType dtype);
hid_t memory_type(DType dtype);
// UTF-8 of exactly that many bytes, filled up with zeros; at least one.
TypeId text_type(size_t bytes);

// An N-dimensional rectangle of a dataset.
struct Block {
  std::vector<hsize_t> start;
  std::vector<hsize_t> count;
  int64_t rows = 0;
};

// The rectangle that begins at row `begin` of the matrix view and holds as many of the rows before `end` as one can.
Block next_block(const Hdf5Info& info, int64_t begin, int64_t end);

// The space of a dataset with this rectangle of it selected.
SpaceId selected(const std::vector<int64_t>& shape, const std::vector<hsize_t>& start,
                 const std::vector<hsize_t>& count);

// Calls transfer(memory space, file space, offset of the first element) for the rectangles of the rows. What went
// wrong, if anything did.
template <class Transfer>
std::optional<std::string> for_each_block(const Hdf5Info& info, Range rows, Transfer transfer) {
  for (int64_t row = rows.begin; row < rows.end;) {
    const Block block = next_block(info, row, rows.end);
    const auto elements = static_cast<hsize_t>(block.rows * info.cols());
    const SpaceId memory(H5Screate_simple(1, &elements, nullptr));
    const SpaceId file = selected(info.shape, block.start, block.count);
    if (!file || transfer(memory.get(), file.get(), (row - rows.begin) * info.cols()) < 0) return last_error();
    row += block.rows;
  }
  return std::nullopt;
}

}  // namespace invar::hdf5
