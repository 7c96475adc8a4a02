#include <algorithm>
#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/hdf5_library.h"
#include "checkpoint/hdf5_structure.h"
#include "core/pending_file.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;

using namespace hdf5;

struct Hdf5Writer::File {
  hid_t id = H5I_INVALID_HID;

  // Whether all that was buffered is written.
  bool close() { return id == H5I_INVALID_HID || H5Fclose(std::exchange(id, hid_t{H5I_INVALID_HID})) >= 0; }
  ~File() {
    const Lock lock;
    close();
  }
};

Hdf5Writer::Hdf5Writer(const fs::path& path)
    : path_(path), pending_(std::make_unique<PendingFile>(path)), file_(std::make_unique<File>()) {
  const Lock lock;
  const PropertyId access = file_access();
  H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG);
  file_->id = H5Fcreate(pending_->temporary().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get());
  if (file_->id < 0) fail_writing(path_, "", "cannot be created");
}

Hdf5Writer::~Hdf5Writer() = default;

void Hdf5Writer::create(const std::string& name, DType dtype, std::span<const int64_t> shape) {
  create(name, dtype, shape, {});
  const Hdf5Info& info = slots_[name].info;
  slots_[name].rows_left = info.cols() == 0 ? 0 : info.rows();
}

void Hdf5Writer::create_virtual(const std::string& name, DType dtype, std::span<const int64_t> shape,
                                std::span<const Hdf5Source> sources) {
  INVAR_CHECK(!sources.empty(), "virtual dataset '{}' without a source", name);
  create(name, dtype, shape, sources);
}

// Rows are counted by the caller: a virtual dataset has none of its own.
void Hdf5Writer::create(const std::string& name, DType dtype, std::span<const int64_t> shape,
                        std::span<const Hdf5Source> sources) {
  INVAR_CHECK(!name.empty() && !slots_.contains(name) && !shape.empty(), "dataset '{}' of shape {}", name,
              describe_shape(shape));
  const Lock lock;
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  const SpaceId space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const PropertyId properties(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(properties.get(), false);
  if (sources.empty()) H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER);
  for (const Hdf5Source& source : sources) {
    const std::vector<hsize_t> start(source.start.begin(), source.start.end());
    const std::vector<hsize_t> count(source.shape.begin(), source.shape.end());
    const SpaceId target = selected({shape.begin(), shape.end()}, start, count);
    const SpaceId whole(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr));
    if (!target ||
        H5Pset_virtual(properties.get(), target.get(), source.file.c_str(), source.dataset.c_str(), whole.get()) < 0) {
      fail_writing(path_, name, "cannot be mapped to " + source.file);
    }
  }
  const PropertyId links(H5Pcreate(H5P_LINK_CREATE));
  H5Pset_create_intermediate_group(links.get(), 1);
  const DatasetId dataset(
      H5Dcreate2(file_->id, name.c_str(), file_type(dtype), space.get(), links.get(), properties.get(), H5P_DEFAULT));
  if (!dataset) fail_writing(path_, name, "cannot be created");
  slots_[name] = {{dtype, {shape.begin(), shape.end()}}, 0};
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
  const Lock lock;
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

}  // namespace

void Hdf5Writer::write_strings(const std::string& name, std::span<const std::string> values) {
  INVAR_CHECK(!values.empty(), "'{}' without a string", name);
  const Lock lock;
  size_t longest = 1;
  for (const std::string& value : values) longest = std::max(longest, value.size());
  std::string packed(values.size() * longest, '\0');
  for (size_t i = 0; i < values.size(); ++i) values[i].copy(packed.data() + i * longest, longest);
  const TypeId type = text_type(longest);
  const auto count = static_cast<hsize_t>(values.size());
  const SpaceId space(H5Screate_simple(1, &count, nullptr));
  const PropertyId links(H5Pcreate(H5P_LINK_CREATE));
  H5Pset_create_intermediate_group(links.get(), 1);
  const PropertyId properties(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(properties.get(), false);
  const DatasetId dataset(
      H5Dcreate2(file_->id, name.c_str(), type.get(), space.get(), links.get(), properties.get(), H5P_DEFAULT));
  if (!dataset || H5Dwrite(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, packed.data()) < 0) {
    fail_writing(path_, name, "cannot be written");
  }
}

void Hdf5Writer::set_attribute(const std::string& name, const std::string& value) {
  const Lock lock;
  const TypeId type = text_type(value.size());
  write_attribute(path_, file_->id, name, type.get(), type.get(), value.c_str());
}

void Hdf5Writer::set_attribute(const std::string& name, int64_t value) {
  const Lock lock;
  write_attribute(path_, file_->id, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

int64_t Hdf5Writer::offset_of(const std::string& name) {
  const Lock lock;
  const DatasetId dataset(H5Dopen2(file_->id, name.c_str(), H5P_DEFAULT));
  const haddr_t offset = dataset ? H5Dget_offset(dataset.get()) : HADDR_UNDEF;
  INVAR_CHECK(offset != HADDR_UNDEF, "{}: '{}' has no place in the file", path_.string(), name);
  return static_cast<int64_t>(offset);
}

void Hdf5Writer::close() {
  for (const auto& [name, slot] : slots_) {
    INVAR_CHECK(slot.rows_left == 0, "{}: '{}': {} rows of {} not written", path_.string(), name, slot.rows_left,
                slot.info.rows());
  }
  const Lock lock;
  if (!file_->close()) fail_writing(path_, "", "cannot be written");
}

void Hdf5Writer::finish() {
  close();
  pending_->publish();
}

void Hdf5Writer::finish_with_sum() {
  close();
  const InputFile written(pending_->temporary().string(), "", ErrorKind::kFault);
  std::string trailer(kSumText);
  const uint32_t sum = crc32_of(written, {0, written.size()});
  trailer.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
  pending_->write_at(std::as_bytes(std::span(trailer)), written.size());
  pending_->publish();
}

}  // namespace invar
