#include <algorithm>
#include <cstring>

#include "checkpoint/hdf5_structure.h"
#include "core/error.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar {

using namespace hdf5;

struct Hdf5Reader::File {
  explicit File(const std::filesystem::path& path) : input(path.string()), structure(read_structure(input)) {}

  [[noreturn]] void fail(const std::string& name, const std::string& what, const std::string& hint = "",
                         std::source_location where = std::source_location::current()) const {
    throw Error(ErrorKind::kData, format("{}: dataset '{}': {}", input.path(), shown(name), what), hint, where);
  }
  const StoredDataset& find(const std::string& name) const {
    const auto found = structure.datasets.find(name);
    if (found == structure.datasets.end()) fail(name, "not in the file");
    if (!found->second.refused.empty()) fail(name, found->second.refused, kDamaged);
    return found->second;
  }
  Hdf5Info info(const std::string& name) const {
    const StoredDataset& dataset = find(name);
    if (!dataset.type.number) fail(name, "is text, numbers are needed");
    return {*dataset.type.number, dataset.shape.empty() ? std::vector<int64_t>{1} : dataset.shape};
  }
  int64_t offset(const std::string& name) const {
    const StoredDataset& dataset = find(name);
    if (!dataset.offset) fail(name, "is put together from other files, which invar does not read");
    return *dataset.offset;
  }
  // The attribute, which must be one value of a type that `fits` accepts; null if there is none of that name.
  template <class Fits>
  const StoredAttribute* attribute(const std::string& name, Fits fits) const {
    const auto found = structure.attributes.find(name);
    if (found == structure.attributes.end()) return nullptr;
    const StoredAttribute& stored = found->second;
    const auto refuse = [&](const std::string& what) {
      throw Error(ErrorKind::kData, format("{}: attribute '{}' {}", input.path(), name, what), kDamaged);
    };
    if (!stored.refused.empty()) refuse(format("is not read: {}", stored.refused));
    if (!stored.type || !fits(*stored.type)) refuse("is of another type");
    if (stored.elements != 1) refuse(format("has {} values, where one is expected", stored.elements));
    if (std::ssize(stored.value) < stored.type->bytes) refuse("ends too early");
    return &stored;
  }

  InputFile input;
  Structure structure;
};

namespace {

bool is_integer(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64;
}

// Values of one type in the file, of another in memory.
template <class Stored, class T>
void read_as(const InputFile& file, int64_t offset, std::span<T> out) {
  constexpr size_t kBlock = 1 << 16;
  std::vector<Stored> block(std::min(kBlock, out.size()));
  while (!out.empty()) {
    const auto part = std::span(block).first(std::min(kBlock, out.size()));
    file.read_at(offset, part);
    std::transform(part.begin(), part.end(), out.begin(), [](Stored value) { return static_cast<T>(value); });
    offset += static_cast<int64_t>(part.size_bytes());
    out = out.subspan(part.size());
  }
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

Hdf5Reader::Hdf5Reader(const std::filesystem::path& path) : file_(std::make_unique<File>(path)) {}

Hdf5Reader::~Hdf5Reader() = default;

std::vector<std::string> Hdf5Reader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, dataset] : file_->structure.datasets) {
    if (contains(name)) names.push_back(name);
  }
  return names;
}

bool Hdf5Reader::contains(const std::string& name) const {
  return name.find('/') == std::string::npos && file_->structure.datasets.contains(name);
}

Hdf5Info Hdf5Reader::info(const std::string& name) const {
  return file_->info(name);
}

int64_t Hdf5Reader::offset_of(const std::string& name) const {
  return file_->offset(name);
}

int64_t Hdf5Reader::file_size() const {
  return file_->input.size();
}

template <class T>
void Hdf5Reader::read_rows(const std::string& name, Range rows, std::span<T> out) const {
  const Hdf5Info info = file_->info(name);
  if (is_integer(DTypeOf<T>::value) && !is_integer(info.dtype)) {
    file_->fail(name, format("is {}, integers are needed", name_of(info.dtype)));
  }
  if (rows.begin < 0 || rows.begin > rows.end || rows.end > info.rows()) {
    file_->fail(name,
                format("rows [{}, {}) are not all in its shape {}", rows.begin, rows.end, describe_shape(info.shape)));
  }
  INVAR_CHECK(std::ssize(out) == rows.size() * info.cols(), "'{}': {} elements into a span of {}", name,
              rows.size() * info.cols(), out.size());
  const int64_t offset = file_->offset(name) + rows.begin * info.cols() * size_of(info.dtype);
  switch (info.dtype) {
    case DType::kF32:
      return read_as<float>(file_->input, offset, out);
    case DType::kF64:
      return read_as<double>(file_->input, offset, out);
    case DType::kI32:
      return read_as<int32_t>(file_->input, offset, out);
    default:
      return read_as<int64_t>(file_->input, offset, out);
  }
}

template void Hdf5Reader::read_rows(const std::string&, Range, std::span<float>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<double>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<int32_t>) const;
template void Hdf5Reader::read_rows(const std::string&, Range, std::span<int64_t>) const;

std::vector<std::string> Hdf5Reader::read_strings(const std::string& name) const {
  const StoredDataset& dataset = file_->find(name);
  if (dataset.type.number || dataset.shape.size() != 1) file_->fail(name, "not a list of texts");
  const auto length = static_cast<size_t>(dataset.type.bytes);
  std::string packed(static_cast<size_t>(dataset.elements) * length, '\0');
  file_->input.read_at(file_->offset(name), std::span(packed));
  std::vector<std::string> values;
  for (size_t at = 0; at < packed.size(); at += length) {
    const std::string padded = packed.substr(at, length);
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

std::optional<std::string> Hdf5Reader::text_attribute(const std::string& name) const {
  const auto* stored = file_->attribute(name, [](const ElementType& type) { return !type.number; });
  if (stored == nullptr) return std::nullopt;
  const std::string text(reinterpret_cast<const char*>(stored->value.data()), static_cast<size_t>(stored->type->bytes));
  return text.substr(0, text.find('\0'));
}

std::optional<int64_t> Hdf5Reader::integer_attribute(const std::string& name) const {
  const auto* stored = file_->attribute(name, [](const ElementType& type) { return type.number == DType::kI64; });
  if (stored == nullptr) return std::nullopt;
  int64_t value = 0;
  std::memcpy(&value, stored->value.data(), sizeof(value));
  return value;
}

}  // namespace invar
