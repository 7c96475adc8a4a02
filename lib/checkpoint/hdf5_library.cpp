#include "checkpoint/hdf5_library.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/file_error.h"

namespace invar::hdf5 {
namespace {

std::recursive_mutex& library() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

// A file that could not be flushed (a full disk) stays in the library's table as a dangling entry, which its exit
// handler would follow. What is open is closed here, so nothing is left for that handler. Errors are thrown, not
// printed.
Lock::Lock() : lock_(library()) {
  [[maybe_unused]] static const bool prepared = H5dont_atexit() >= 0;
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // a thread's own, where the library knows threads
}

std::string last_error() {
  std::string text;
  const auto keep = [](unsigned, const H5E_error2_t* error, void* into) -> herr_t {
    if (error->desc != nullptr) *static_cast<std::string*>(into) = error->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep, &text);
  // Of a failed system call it says time, descriptor, addresses, and among them what we want.
  constexpr std::string_view kMessage = "error message = '";
  if (const size_t at = text.find(kMessage); at != std::string::npos) {
    text = text.substr(at + kMessage.size());
    text.resize(std::min(text.size(), text.find('\'')));
  }
  return text.empty() ? "unknown HDF5 failure" : text;
}

[[noreturn]] void fail_writing(const std::filesystem::path& file, const std::string& name, const std::string& what,
                               const std::string& reason, std::source_location where) {
  std::string fix;  // the library has made text of the error number
  for (const int code : {ENOSPC, EDQUOT, EFBIG, EACCES, EROFS}) {
    if (reason.find(std::strerror(code)) != std::string::npos) fix = fix_of_file_error(code);
  }
  throw Error(ErrorKind::kFault,
              name.empty() ? format("{}: {}: {}", file.string(), what, reason)
                           : format("{}: dataset '{}': {}: {}", file.string(), name, what, reason),
              fix, where);
}

PropertyId file_access() {
  PropertyId access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_file_locking(access.get(), false, true);
  // HDF5 2.0 writes newer forms by default. hdf5_structure reads the oldest ones.
  H5Pset_libver_bounds(access.get(), H5F_LIBVER_EARLIEST, H5F_LIBVER_LATEST);
  return access;
}

hid_t file_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return H5T_IEEE_F32LE;
    case DType::kF64:
      return H5T_IEEE_F64LE;
    case DType::kI32:
      return H5T_STD_I32LE;
    case DType::kI64:
      return H5T_STD_I64LE;
    case DType::kBF16:
      break;
  }
  throw Error(ErrorKind::kFault, format("HDF5 has no {}", name_of(dtype)));
}

hid_t memory_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return H5T_NATIVE_FLOAT;
    case DType::kF64:
      return H5T_NATIVE_DOUBLE;
    case DType::kI32:
      return H5T_NATIVE_INT32;
    default:
      return H5T_NATIVE_INT64;
  }
}

TypeId text_type(size_t bytes) {
  TypeId type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), std::max<size_t>(1, bytes));
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  return type;
}

Block next_block(const Hdf5Info& info, int64_t begin, int64_t end) {
  const size_t row_dims = info.shape.size() == 1 ? 1 : info.shape.size() - 1;
  Block block;
  for (const int64_t size : info.shape) {
    block.start.push_back(0);
    block.count.push_back(static_cast<hsize_t>(size));
  }
  int64_t stride = info.rows();
  int64_t rest = begin;
  for (size_t d = 0; d < row_dims; ++d) {
    stride /= info.shape[d];  // rows for one index of this dim
    block.start[d] = static_cast<hsize_t>(rest / stride);
    rest %= stride;
    if (rest == 0 && end - begin >= stride) {
      const int64_t most = info.shape[d] - static_cast<int64_t>(block.start[d]);
      const int64_t count = std::min(most, (end - begin) / stride);
      block.count[d] = static_cast<hsize_t>(count);
      block.rows = count * stride;
      return block;
    }
    block.count[d] = 1;
  }
  return block;
}

SpaceId selected(const std::vector<int64_t>& shape, const std::vector<hsize_t>& start,
                 const std::vector<hsize_t>& count) {
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  SpaceId space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  if (!space || H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr) < 0) {
    return {};
  }
  return space;
}

}  // namespace invar::hdf5
