#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "checkpoint/hdf5_library.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;

using namespace hdf5;

struct Hdf5Reader::File {
  FileId id;

  ~File() {
    const Lock lock;
    id = FileId();
  }
};

Hdf5Reader::Hdf5Reader(const fs::path& path) : path_(path), file_(std::make_unique<File>()) {
  const Lock lock;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail(ErrorKind::kData, path_, "", error ? error.message() : "no such file");
  if (!fs::is_regular_file(status)) fail(ErrorKind::kData, path_, "", "not a file");
  if (!std::ifstream(path)) fail(ErrorKind::kData, path_, "", format("cannot be opened: {}", std::strerror(errno)));
  if (H5Fis_hdf5(path.c_str()) == 0) fail(ErrorKind::kData, path_, "", "not an HDF5 file", kDamaged);
  const PropertyId access = file_access();
  file_->id = FileId(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()));
  if (!file_->id) fail(ErrorKind::kData, path_, "", last_error(), kDamaged);
}

Hdf5Reader::~Hdf5Reader() = default;

std::vector<std::string> Hdf5Reader::names() const {
  const Lock lock;
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
  const Lock lock;
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
  const Lock lock;
  return info_of(path_, open_dataset(path_, file_->id.get(), name).get(), name);
}

template <class T>
void Hdf5Reader::read_rows(const std::string& name, Range rows, std::span<T> out) const {
  const Lock lock;
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

void Hdf5Reader::read_rectangle(const std::string& name, Range rows, Range cols, std::span<float> out) const {
  const Lock lock;
  const DatasetId dataset = open_dataset(path_, file_->id.get(), name);
  const Hdf5Info info = info_of(path_, dataset.get(), name);
  const bool inside = rows.begin >= 0 && rows.end <= info.rows() && cols.begin >= 0 && cols.end <= info.cols();
  if (info.shape.size() > 2 || !inside) {
    fail(ErrorKind::kData, path_, name,
         format("rows [{}, {}) of columns [{}, {}) are not all in its shape {}", rows.begin, rows.end, cols.begin,
                cols.end, describe_shape(info.shape)));
  }
  INVAR_CHECK(std::ssize(out) == rows.size() * cols.size(), "'{}': {} elements into a span of {}", name,
              rows.size() * cols.size(), out.size());
  if (out.empty()) return;
  const auto size = [](int64_t n) { return static_cast<hsize_t>(n); };
  std::vector<hsize_t> start = {size(rows.begin), size(cols.begin)};
  std::vector<hsize_t> count = {size(rows.size()), size(cols.size())};
  start.resize(info.shape.size());
  count.resize(info.shape.size());
  const SpaceId file = selected(info.shape, start, count);
  const hsize_t elements = out.size();
  const SpaceId memory(H5Screate_simple(1, &elements, nullptr));
  if (!file || H5Dread(dataset.get(), H5T_NATIVE_FLOAT, memory.get(), file.get(), H5P_DEFAULT, out.data()) < 0) {
    fail(ErrorKind::kData, path_, name, last_error(), kDamaged);
  }
}

std::vector<std::string> Hdf5Reader::read_strings(const std::string& name) const {
  const Lock lock;
  const DatasetId dataset = open_dataset(path_, file_->id.get(), name);
  const TypeId type(H5Dget_type(dataset.get()));
  const SpaceId space(H5Dget_space(dataset.get()));
  if (H5Tget_class(type.get()) != H5T_STRING || H5Tis_variable_str(type.get()) > 0 ||
      H5Sget_simple_extent_ndims(space.get()) != 1) {
    fail(ErrorKind::kData, path_, name, "not a list of strings", kDamaged);
  }
  hsize_t count = 0;
  H5Sget_simple_extent_dims(space.get(), &count, nullptr);
  const size_t longest = H5Tget_size(type.get());
  std::string packed(count * longest, '\0');
  if (H5Dread(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, packed.data()) < 0) {
    fail(ErrorKind::kData, path_, name, last_error(), kDamaged);
  }
  std::vector<std::string> values;
  for (size_t i = 0; i < count; ++i) {
    const std::string padded = packed.substr(i * longest, longest);
    values.push_back(padded.substr(0, padded.find('\0')));
  }
  return values;
}

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
  const Lock lock;
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
  const Lock lock;
  return read_number<int64_t>(path_, file_->id.get(), name, H5T_INTEGER);
}

std::optional<double> Hdf5Reader::real_attribute(const std::string& name) const {
  const Lock lock;
  return read_number<double>(path_, file_->id.get(), name, H5T_FLOAT);
}

}  // namespace invar
