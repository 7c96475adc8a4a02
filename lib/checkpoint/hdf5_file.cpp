#include "checkpoint/hdf5_file.h"

#include <hdf5.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "checkpoint/pending_file.h"
#include "core/tensor.h"
#include "core/unique_handle.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

template <auto Close>
using Id = UniqueHandle<hid_t, Close, hid_t{H5I_INVALID_HID}>;
using FileId = Id<H5Fclose>;
using DatasetId = Id<H5Dclose>;
using ObjectId = Id<H5Oclose>;
using SpaceId = Id<H5Sclose>;
using TypeId = Id<H5Tclose>;
using AttributeId = Id<H5Aclose>;
using PropertyId = Id<H5Pclose>;

// What the library says of its last failure, at the place where it came up. The next call, a close among them, forgets
// it.
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

[[noreturn]] void fail(ErrorKind kind, const fs::path& file, const std::string& name, const std::string& what,
                       const std::string& hint = "", std::source_location where = std::source_location::current()) {
  throw Error(
      kind,
      name.empty() ? format("{}: {}", file.string(), what) : format("{}: dataset '{}': {}", file.string(), name, what),
      hint, where);
}

[[noreturn]] void fail_writing(const fs::path& file, const std::string& name, const std::string& what,
                               const std::string& reason = last_error(),
                               std::source_location where = std::source_location::current()) {
  const auto says = [&](int code) { return reason.find(std::strerror(code)) != std::string::npos; };
  fail(ErrorKind::kFault, file, name, format("{}: {}", what, reason),
       says(ENOSPC) || says(EDQUOT) ? "free some space or write to another disk" : "", where);
}

constexpr const char* kDamaged = "the file is damaged, was not copied whole, or is not an HDF5 file";

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

std::optional<DType> dtype_of(hid_t type) {
  const H5T_class_t kind = H5Tget_class(type);
  const size_t bytes = H5Tget_size(type);
  if (kind == H5T_FLOAT && bytes == 4) return DType::kF32;
  if (kind == H5T_FLOAT && bytes == 8) return DType::kF64;
  if (kind == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2 && bytes == 4) return DType::kI32;
  if (kind == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2 && bytes == 8) return DType::kI64;
  return std::nullopt;
}

bool is_integer(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64;
}

struct Block {
  std::vector<hsize_t> start;
  std::vector<hsize_t> count;
  int64_t rows = 0;
};

// The rectangle that begins at row `begin` of the matrix view and holds as many of the rows before `end` as one can.
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

// Calls transfer(memory space, file space, offset of the first element) for the rectangles of the rows. What went
// wrong, if anything did.
template <class Transfer>
std::optional<std::string> for_each_block(const Hdf5Info& info, Range rows, Transfer transfer) {
  for (int64_t row = rows.begin; row < rows.end;) {
    const Block block = next_block(info, row, rows.end);
    const auto elements = static_cast<hsize_t>(block.rows * info.cols());
    const SpaceId memory(H5Screate_simple(1, &elements, nullptr));
    std::vector<hsize_t> shape(info.shape.begin(), info.shape.end());
    const SpaceId file(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr));
    if (H5Sselect_hyperslab(file.get(), H5S_SELECT_SET, block.start.data(), nullptr, block.count.data(), nullptr) < 0 ||
        transfer(memory.get(), file.get(), (row - rows.begin) * info.cols()) < 0) {
      return last_error();
    }
    row += block.rows;
  }
  return std::nullopt;
}

// Before any other call. A file that could not be flushed (a full disk) stays in the library's table as a dangling
// entry, which its exit handler would follow; what is open is closed here, so nothing is left for that handler.
void prepare_library() {
  H5dont_atexit();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // errors are thrown, not printed
}

}  // namespace

int64_t Hdf5Info::rows() const {
  int64_t rows = shape.empty() ? 1 : shape[0];
  for (size_t d = 1; d + 1 < shape.size(); ++d) rows *= shape[d];
  return rows;
}

int64_t Hdf5Info::cols() const {
  return shape.size() < 2 ? 1 : shape.back();
}

struct Hdf5Writer::File {
  hid_t id = H5I_INVALID_HID;

  // Whether all that was buffered is written.
  bool close() { return id == H5I_INVALID_HID || H5Fclose(std::exchange(id, hid_t{H5I_INVALID_HID})) >= 0; }
  ~File() { close(); }
};

Hdf5Writer::Hdf5Writer(const fs::path& path)
    : path_(path), pending_(std::make_unique<PendingFile>(path)), file_(std::make_unique<File>()) {
  prepare_library();
  const PropertyId access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG);
  file_->id = H5Fcreate(pending_->temporary().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get());
  if (file_->id < 0) fail_writing(path_, "", "cannot be created");
}

Hdf5Writer::~Hdf5Writer() = default;

void Hdf5Writer::create(const std::string& name, DType dtype, std::span<const int64_t> shape) {
  INVAR_CHECK(!name.empty() && name.find('/') == std::string::npos && !slots_.contains(name) && !shape.empty(),
              "dataset '{}' of shape {}", name, describe_shape(shape));
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  const SpaceId space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const PropertyId properties(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(properties.get(), false);
  H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER);
  const DatasetId dataset(
      H5Dcreate2(file_->id, name.c_str(), file_type(dtype), space.get(), H5P_DEFAULT, properties.get(), H5P_DEFAULT));
  if (!dataset) fail_writing(path_, name, "cannot be created");
  const Hdf5Info info{dtype, {shape.begin(), shape.end()}};
  slots_[name] = {info, info.cols() == 0 ? 0 : info.rows()};
}

template <class T>
void Hdf5Writer::write_rows(const std::string& name, int64_t first_row, std::span<const T> values) {
  const auto found = slots_.find(name);
  INVAR_CHECK(found != slots_.end(), "{}: no dataset '{}'", path_.string(), name);
  auto& [info, rows_left] = found->second;
  INVAR_CHECK(info.dtype == DTypeOf<T>::value, "'{}' is {}", name, name_of(info.dtype));
  const int64_t cols = info.cols();
  const int64_t count = cols == 0 ? 0 : std::ssize(values) / cols;
  INVAR_CHECK(count * cols == std::ssize(values) && first_row >= 0 && first_row + count <= info.rows(),
              "'{}' of shape {}: {} elements at row {}", name, describe_shape(info.shape), values.size(), first_row);
  const DatasetId dataset(H5Dopen2(file_->id, name.c_str(), H5P_DEFAULT));
  if (!dataset) fail_writing(path_, name, "cannot be opened");
  const hid_t type = memory_type(info.dtype);
  const auto write_block = [&](hid_t memory, hid_t file, int64_t offset) {
    return H5Dwrite(dataset.get(), type, memory, file, H5P_DEFAULT, values.data() + offset);
  };
  const auto failure = for_each_block(info, {first_row, first_row + count}, write_block);
  if (failure) fail_writing(path_, name, "cannot be written", *failure);
  rows_left -= count;
}

template <class T>
void Hdf5Writer::write(const std::string& name, std::span<const int64_t> shape, std::span<const T> values) {
  create(name, DTypeOf<T>::value, shape);
  const Hdf5Info& info = slots_[name].info;
  INVAR_CHECK(info.rows() * info.cols() == std::ssize(values), "'{}' of shape {} from {} elements", name,
              describe_shape(shape), values.size());
  write_rows(name, 0, values);
}

template void Hdf5Writer::write_rows(const std::string&, int64_t, std::span<const float>);
template void Hdf5Writer::write_rows(const std::string&, int64_t, std::span<const double>);
template void Hdf5Writer::write_rows(const std::string&, int64_t, std::span<const int32_t>);
template void Hdf5Writer::write_rows(const std::string&, int64_t, std::span<const int64_t>);
template void Hdf5Writer::write(const std::string&, std::span<const int64_t>, std::span<const float>);
template void Hdf5Writer::write(const std::string&, std::span<const int64_t>, std::span<const double>);
template void Hdf5Writer::write(const std::string&, std::span<const int64_t>, std::span<const int32_t>);
template void Hdf5Writer::write(const std::string&, std::span<const int64_t>, std::span<const int64_t>);

namespace {

void write_attribute(const fs::path& path, hid_t file, const std::string& name, hid_t stored, hid_t memory,
                     const void* value) {
  const SpaceId scalar(H5Screate(H5S_SCALAR));
  const AttributeId attribute(H5Acreate2(file, name.c_str(), stored, scalar.get(), H5P_DEFAULT, H5P_DEFAULT));
  if (!attribute || H5Awrite(attribute.get(), memory, value) < 0) {
    fail_writing(path, "", format("attribute '{}' cannot be written", name));
  }
}

TypeId text_type(size_t bytes) {
  TypeId type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), std::max<size_t>(1, bytes));
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  return type;
}

}  // namespace

void Hdf5Writer::set_attribute(const std::string& name, const std::string& value) {
  const TypeId type = text_type(value.size());
  write_attribute(path_, file_->id, name, type.get(), type.get(), value.c_str());
}

void Hdf5Writer::set_attribute(const std::string& name, int64_t value) {
  write_attribute(path_, file_->id, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

void Hdf5Writer::set_attribute(const std::string& name, double value) {
  write_attribute(path_, file_->id, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
}

void Hdf5Writer::finish() {
  for (const auto& [name, slot] : slots_) {
    INVAR_CHECK(slot.rows_left == 0, "{}: '{}': {} rows of {} not written", path_.string(), name, slot.rows_left,
                slot.info.rows());
  }
  if (!file_->close()) fail_writing(path_, "", "cannot be written");
  pending_->publish();
}

struct Hdf5Reader::File {
  FileId id;
};

Hdf5Reader::Hdf5Reader(const fs::path& path) : path_(path), file_(std::make_unique<File>()) {
  prepare_library();
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail(ErrorKind::kData, path_, "", error ? error.message() : "no such file");
  if (!fs::is_regular_file(status)) fail(ErrorKind::kData, path_, "", "not a file");
  if (!std::ifstream(path)) fail(ErrorKind::kData, path_, "", format("cannot be opened: {}", std::strerror(errno)));
  if (H5Fis_hdf5(path.c_str()) == 0) fail(ErrorKind::kData, path_, "", "not an HDF5 file", kDamaged);
  file_->id = FileId(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  if (!file_->id) fail(ErrorKind::kData, path_, "", last_error(), kDamaged);
}

Hdf5Reader::~Hdf5Reader() = default;

std::vector<std::string> Hdf5Reader::names() const {
  std::vector<std::string> names;
  const auto keep = [](hid_t, const char* name, const H5L_info_t*, void* into) -> herr_t {
    static_cast<std::vector<std::string>*>(into)->emplace_back(name);
    return 0;
  };
  if (H5Literate(file_->id.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, keep, &names) < 0) {
    fail(ErrorKind::kData, path_, "", last_error(), kDamaged);
  }
  std::erase_if(names, [&](const std::string& name) { return !contains(name); });
  return names;
}

bool Hdf5Reader::contains(const std::string& name) const {
  if (name.find('/') != std::string::npos || H5Lexists(file_->id.get(), name.c_str(), H5P_DEFAULT) <= 0) return false;
  const ObjectId object(H5Oopen(file_->id.get(), name.c_str(), H5P_DEFAULT));
  if (!object) fail(ErrorKind::kData, path_, name, last_error(), kDamaged);  // there, but not to be read
  const H5I_type_t type = H5Iget_type(object.get());
  if (type != H5I_DATASET && type != H5I_GROUP) fail(ErrorKind::kData, path_, name, "not a dataset", kDamaged);
  return type == H5I_DATASET;
}

namespace {

DatasetId open_dataset(const fs::path& path, hid_t file, const std::string& name) {
  DatasetId dataset(H5Dopen2(file, name.c_str(), H5P_DEFAULT));
  if (!dataset) fail(ErrorKind::kData, path, name, "not in the file");
  return dataset;
}

Hdf5Info info_of(const fs::path& path, hid_t dataset, const std::string& name) {
  const TypeId type(H5Dget_type(dataset));
  const std::optional<DType> dtype = dtype_of(type.get());
  if (!dtype) fail(ErrorKind::kData, path, name, "neither f32, f64, i32 nor i64");
  const SpaceId space(H5Dget_space(dataset));
  const int dims = H5Sget_simple_extent_ndims(space.get());
  if (dims < 0) fail(ErrorKind::kData, path, name, last_error(), kDamaged);
  std::vector<hsize_t> shape(static_cast<size_t>(dims));
  H5Sget_simple_extent_dims(space.get(), shape.data(), nullptr);
  Hdf5Info info{*dtype, {shape.begin(), shape.end()}};
  if (info.shape.empty()) info.shape = {1};  // a scalar
  return info;
}

}  // namespace

Hdf5Info Hdf5Reader::info(const std::string& name) const {
  return info_of(path_, open_dataset(path_, file_->id.get(), name).get(), name);
}

template <class T>
void Hdf5Reader::read_rows(const std::string& name, Range rows, std::span<T> out) const {
  const DatasetId dataset = open_dataset(path_, file_->id.get(), name);
  const Hdf5Info info = info_of(path_, dataset.get(), name);
  if (is_integer(DTypeOf<T>::value) && !is_integer(info.dtype)) {
    fail(ErrorKind::kData, path_, name, format("is {}, integers are needed", name_of(info.dtype)));
  }
  if (rows.begin < 0 || rows.begin > rows.end || rows.end > info.rows()) {
    fail(ErrorKind::kData, path_, name,
         format("rows [{}, {}) are not all in its shape {}", rows.begin, rows.end, describe_shape(info.shape)));
  }
  INVAR_CHECK(std::ssize(out) == rows.size() * info.cols(), "'{}': {} elements into a span of {}", name,
              rows.size() * info.cols(), out.size());
  if (out.empty()) return;
  const SpaceId stored(H5Dget_space(dataset.get()));
  const bool is_scalar = H5Sget_simple_extent_ndims(stored.get()) == 0;
  const hid_t type = memory_type(DTypeOf<T>::value);
  const auto read = [&](hid_t memory, hid_t file, int64_t offset) {
    return H5Dread(dataset.get(), type, memory, file, H5P_DEFAULT, out.data() + offset);
  };
  if (is_scalar) {
    if (read(H5S_ALL, H5S_ALL, 0) < 0) fail(ErrorKind::kData, path_, name, last_error(), kDamaged);
  } else if (const auto failure = for_each_block(info, rows, read)) {
    fail(ErrorKind::kData, path_, name, *failure, kDamaged);
  }
}

template void Hdf5Reader::read_rows(const std::string&, Range, std::span<float>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<double>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<int32_t>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<int64_t>) const;

std::vector<float> Hdf5Reader::read_f32(const std::string& name) const {
  const Hdf5Info shape = info(name);
  std::vector<float> out(static_cast<size_t>(shape.rows() * shape.cols()));
  read_rows<float>(name, {0, shape.rows()}, out);
  return out;
}

namespace {

// The attribute if it is there and of that class.
AttributeId open_attribute(const fs::path& path, hid_t file, const std::string& name, H5T_class_t kind) {
  if (H5Aexists(file, name.c_str()) <= 0) return {};
  AttributeId attribute(H5Aopen(file, name.c_str(), H5P_DEFAULT));
  const TypeId type(attribute ? H5Aget_type(attribute.get()) : H5I_INVALID_HID);
  const bool fits = type && H5Tget_class(type.get()) == kind && H5Tis_variable_str(type.get()) <= 0;
  if (!fits) fail(ErrorKind::kData, path, "", format("attribute '{}' is of another type", name));
  return attribute;
}

template <class T>
std::optional<T> read_number(const fs::path& path, hid_t file, const std::string& name, H5T_class_t kind) {
  const AttributeId attribute = open_attribute(path, file, name, kind);
  if (!attribute) return std::nullopt;
  T value{};
  if (H5Aread(attribute.get(), memory_type(DTypeOf<T>::value), &value) < 0) {
    fail(ErrorKind::kData, path, "", format("attribute '{}': {}", name, last_error()), kDamaged);
  }
  return value;
}

}  // namespace

std::optional<std::string> Hdf5Reader::text_attribute(const std::string& name) const {
  const AttributeId attribute = open_attribute(path_, file_->id.get(), name, H5T_STRING);
  if (!attribute) return std::nullopt;
  const TypeId stored(H5Aget_type(attribute.get()));
  std::string value(H5Tget_size(stored.get()), '\0');
  if (H5Aread(attribute.get(), stored.get(), value.data()) < 0) {
    fail(ErrorKind::kData, path_, "", format("attribute '{}': {}", name, last_error()), kDamaged);
  }
  value.resize(std::min(value.size(), value.find('\0')));
  return value;
}

std::optional<int64_t> Hdf5Reader::integer_attribute(const std::string& name) const {
  return read_number<int64_t>(path_, file_->id.get(), name, H5T_INTEGER);
}

std::optional<double> Hdf5Reader::real_attribute(const std::string& name) const {
  return read_number<double>(path_, file_->id.get(), name, H5T_FLOAT);
}

}  // namespace invar
