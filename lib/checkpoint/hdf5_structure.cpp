#include "checkpoint/hdf5_structure.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/checksum.h"
#include "core/damage.h"
#include "core/error.h"
#include "core/integer.h"
#include "core/shown.h"

namespace invar::hdf5 {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::string_view kSignature = "\x89HDF\r\n\x1a\n";
constexpr int64_t kSuperblockBytes = 96;
constexpr int kDeepestGroup = 16;
constexpr size_t kMostDims = 32;
constexpr int64_t kMostDescription = int64_t{1} << 30;  // bytes of all descriptions of a file

// Kinds of messages in object headers.
enum Message : uint16_t {
  kDataspace = 0x01,
  kDatatype = 0x03,
  kExternalFiles = 0x07,
  kLayout = 0x08,
  kFilters = 0x0b,
  kAttribute = 0x0c,
  kContinuation = 0x10,
  kSymbolTable = 0x11,
};

// The numbers' descriptions, byte for byte: class and version, bits, size, properties.
struct NumberType {
  DType dtype;
  std::string_view description;
};
using namespace std::string_view_literals;
constexpr NumberType kNumberTypes[] = {
    {DType::kF32, "\x11\x20\x1f\0\x04\0\0\0\0\0\x20\0\x17\x08\0\x17\x7f\0\0\0"sv},
    {DType::kF64, "\x11\x20\x3f\0\x08\0\0\0\0\0\x40\0\x34\x0b\0\x34\xff\x03\0\0"sv},
    {DType::kI32, "\x10\x08\0\0\x04\0\0\0\0\0\x20\0"sv},
    {DType::kI64, "\x10\x08\0\0\x08\0\0\0\0\0\x40\0"sv},
};
constexpr std::byte kTextType{0x13};

// A part of the file; every access is inside it.
class View {
 public:
  explicit View(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> part(size_t at, size_t size) const {
    if (at > bytes_.size() || size > bytes_.size() - at) throw Damage{"a description ends too early"};
    return bytes_.subspan(at, size);
  }
  View from(size_t at) const { return View(part(at, bytes_.size() - std::min(at, bytes_.size()))); }
  template <class T>
  T number(size_t at) const {
    T value;
    std::memcpy(&value, part(at, sizeof(T)).data(), sizeof(T));
    return value;
  }
  // An address, a size or a count, of which none is negative.
  int64_t position(size_t at) const {
    const auto value = number<int64_t>(at);
    if (value < 0) throw Damage{"a size or an address is out of range"};
    return value;
  }
  std::string_view text(size_t at, size_t size) const {
    return {reinterpret_cast<const char*>(part(at, size).data()), size};
  }
  void expect(std::string_view signature) const {
    if (text(0, signature.size()) != signature) throw Damage{format("no {} where one is expected", signature)};
  }
  size_t size() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};

std::optional<ElementType> type_of(const View& description) {
  for (const NumberType& type : kNumberTypes) {
    const size_t size = type.description.size();
    if (description.size() < size || description.text(0, size) != type.description) continue;
    return ElementType{type.dtype, static_cast<int64_t>(size_of(type.dtype))};
  }
  if (description.number<std::byte>(0) != kTextType) return std::nullopt;
  return ElementType{std::nullopt, description.number<uint32_t>(4)};
}

std::vector<int64_t> shape_of(const View& dataspace) {
  if (dataspace.number<uint8_t>(0) != 1) throw Damage{"its dataspace is of a version that invar does not read"};
  const auto dims = dataspace.number<uint8_t>(1);
  if (dims > kMostDims) throw Damage{format("{} dims", dims)};
  std::vector<int64_t> shape;
  for (size_t d = 0; d < dims; ++d) shape.push_back(dataspace.position(8 + 8 * d));
  return shape;
}

int64_t elements_of(const std::vector<int64_t>& shape) {
  const std::optional<int64_t> elements = checked_product(shape);
  if (!elements) throw Damage{"its shape has more elements than can be counted"};
  return *elements;
}

class StructureParser {
 public:
  explicit StructureParser(const InputFile& file) : file_(file), left_(std::min(file.size(), kMostDescription)) {}

  Structure parse() {
    try {
      const int64_t root = read_superblock();
      read_group(root, "", 0);
    } catch (const Damage& damage) {
      throw Error(ErrorKind::kData,
                  path_.empty() ? format("{}: {}", file_.path(), damage.what)
                                : format("{}: dataset '{}': {}", file_.path(), shown(path_), damage.what),
                  kDamaged);
    }
    return std::move(structure_);
  }

 private:
  struct Header {
    std::vector<std::pair<uint16_t, Bytes>> messages;

    const Bytes* find(Message kind) const {
      const auto found = std::find_if(messages.begin(), messages.end(), [=](const auto& m) { return m.first == kind; });
      return found == messages.end() ? nullptr : &found->second;
    }
    View get(Message kind, const char* name) const {
      const Bytes* message = find(kind);
      if (message == nullptr) throw Damage{format("has no {}", name)};
      return View(*message);
    }
  };

  // Descriptions in a sound file lie apart, so that together they are no larger than it. Whatever refers to itself, or
  // to one place many times, comes to an end here.
  Bytes bytes(int64_t address, int64_t size) {
    if (address < 0 || size < 0 || address > file_.size() || size > file_.size() - address) {
      throw Damage{format("bytes {} + {} are not in the file", address, size)};
    }
    left_ -= size;
    if (left_ < 0) throw Damage{"its descriptions overlap"};
    Bytes result(static_cast<size_t>(size));
    file_.read_at(address, std::span(result));
    return result;
  }

  // The address of the root's object header.
  int64_t read_superblock() {
    if (file_.size() < kSuperblockBytes) throw Damage{"not an HDF5 file"};
    const Bytes block = bytes(0, kSuperblockBytes);
    const View view(block);
    if (view.text(0, kSignature.size()) != kSignature) throw Damage{"not an HDF5 file"};
    if (view.number<uint8_t>(8) != 0 || view.number<uint8_t>(13) != 8 || view.number<uint8_t>(14) != 8 ||
        view.position(24) != 0) {
      throw Damage{"an HDF5 file in a format that invar does not read (superblock 0 alone)"};
    }
    const int64_t end = view.position(40);
    if (end > file_.size()) {
      throw Damage{format("truncated: has {} bytes, was written with {}", file_.size(), end)};
    }
    check_sum(end);
    return view.position(64);
  }

  void check_sum(int64_t end) const {
    if (end == file_.size()) return;
    Bytes trailer(kSumBytes);
    if (file_.size() - end != kSumBytes) throw Damage{format("has {} bytes, was written with {}", file_.size(), end)};
    file_.read_at(end, std::span(trailer));
    const View view(trailer);
    if (view.text(0, kSumText.size()) != kSumText ||
        view.number<uint32_t>(kSumText.size()) != crc32_of(file_, {0, end})) {
      throw Damage{"damaged, its checksum is not the one it was written with"};
    }
  }

  Header read_header(int64_t address) {
    const Bytes prefix = bytes(address, 16);
    const View view(prefix);
    if (view.number<uint8_t>(0) != 1) throw Damage{"a description is of a version that invar does not read"};
    const auto count = view.number<uint16_t>(2);
    std::vector<std::pair<int64_t, int64_t>> blocks = {{address + 16, view.number<uint32_t>(8)}};
    Header header;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Bytes block = bytes(blocks[i].first, blocks[i].second);
      const View messages(block);
      for (size_t at = 0; at + 8 <= block.size() && header.messages.size() < count;) {
        const auto kind = messages.number<uint16_t>(at);
        const auto size = messages.number<uint16_t>(at + 2);
        const bool is_shared = (messages.number<uint8_t>(at + 4) & 2) != 0;
        if (is_shared) throw Damage{"a description is shared, which invar does not read"};
        const auto body = messages.part(at + 8, size);
        header.messages.emplace_back(kind, Bytes(body.begin(), body.end()));
        if (kind == kContinuation) blocks.emplace_back(View(body).position(0), View(body).position(8));
        at += 8 + size_t{size};
      }
    }
    if (header.messages.size() != count) throw Damage{"a description ends too early"};
    return header;
  }

  void read_group(int64_t address, const std::string& path, int depth) {
    if (depth > kDeepestGroup) throw Damage{"too many groups in each other"};
    const Header header = read_header(address);
    if (depth == 0) read_attributes(header);
    const View table = header.get(kSymbolTable, "symbol table");
    const Bytes heap = bytes(table.position(8), 32);
    View(heap).expect("HEAP");
    const Bytes names = bytes(View(heap).position(24), View(heap).position(8));
    read_tree(table.position(0), std::nullopt, View(names), path, depth);
  }

  // A node of a tree of names: level 0 is just above the symbols, and each level just below the one that leads to it.
  void read_tree(int64_t address, std::optional<int> level, const View& names, const std::string& path, int depth) {
    const Bytes head = bytes(address, 24);
    const View view(head);
    view.expect("TREE");
    const int found = view.number<uint8_t>(5);
    if (view.number<uint8_t>(4) != 0 || (level && found != *level)) throw Damage{"a group's tree is of another kind"};
    const auto used = view.number<uint16_t>(6);
    const Bytes entries = bytes(address + 24, 16 * int64_t{used} + 8);
    for (size_t i = 0; i < used; ++i) {
      const int64_t child = View(entries).position(16 * i + 8);
      if (found > 0) {
        read_tree(child, found - 1, names, path, depth);
      } else {
        read_symbols(child, names, path, depth);
      }
    }
  }

  void read_symbols(int64_t address, const View& names, const std::string& path, int depth) {
    constexpr size_t kEntry = 40;
    constexpr size_t kLongestName = 1024;
    const Bytes head = bytes(address, 8);
    View(head).expect("SNOD");
    const auto count = View(head).number<uint16_t>(6);
    const Bytes block = bytes(address + 8, static_cast<int64_t>(kEntry) * count);
    const View entries(block);
    for (size_t i = 0; i < count; ++i) {
      const View rest = names.from(static_cast<size_t>(entries.position(kEntry * i)));
      const std::string_view text = rest.text(0, rest.size());
      const size_t length = text.find('\0');
      if (length == 0 || length == std::string_view::npos) throw Damage{"a name without an end"};
      if (length > kLongestName) throw Damage{format("a name of {} bytes", length)};
      const std::string name(text.substr(0, length));
      const bool is_link = entries.number<uint32_t>(kEntry * i + 16) > 1;
      read_object(is_link ? std::nullopt : std::optional(entries.position(kEntry * i + 8)),
                  path.empty() ? name : format("{}/{}", path, name), depth);
    }
  }

  // No address: a link.
  void read_object(std::optional<int64_t> address, const std::string& path, int depth) {
    path_ = path;
    const int64_t before = left_;
    StoredDataset dataset;
    bool is_group = false;
    try {
      if (!address) throw Damage{"is a link"};
      const Header header = read_header(*address);
      is_group = header.find(kSymbolTable) != nullptr;
      if (!is_group) dataset = read_dataset(header);
    } catch (const Damage& damage) {
      if (left_ < 0) throw;  // of the whole file
      dataset.refused = damage.what;
    }
    if (is_group) {
      left_ = before;  // read once more, as a group
      read_group(*address, path, depth + 1);
    } else if (!structure_.datasets.emplace(path, std::move(dataset)).second) {
      throw Damage{"twice in the file"};
    }
    path_.clear();
  }

  StoredDataset read_dataset(const Header& header) const {
    const std::optional<ElementType> type = type_of(header.get(kDatatype, "type"));
    if (!type) throw Damage{"neither f32, f64, i32 nor i64 of little-endian order, nor text of one length"};
    StoredDataset dataset{*type, shape_of(header.get(kDataspace, "shape")), 0, std::nullopt};
    dataset.elements = elements_of(dataset.shape);
    const std::optional<int64_t> size = checked_product(std::vector<int64_t>{dataset.elements, type->bytes});
    if (!size) throw Damage{"its shape has more elements than can be counted"};
    constexpr uint8_t kContiguous = 1, kVirtual = 3;
    const View layout = header.get(kLayout, "layout");
    const auto version = layout.number<uint8_t>(0), kind = layout.number<uint8_t>(1);
    if (version == 4 && kind == kVirtual) return dataset;
    if (version != 3 || kind != kContiguous || header.find(kExternalFiles) != nullptr ||
        header.find(kFilters) != nullptr) {
      throw Damage{"its values do not lie in one piece in this file, uncompressed: invar reads no others"};
    }
    if (layout.number<int64_t>(10) != *size) throw Damage{"has another size than its shape"};
    dataset.offset = *size == 0 ? 0 : layout.position(2);
    if (*dataset.offset > file_.size() - *size) throw Damage{"its values are not in the file"};
    return dataset;
  }

  void read_attributes(const Header& header) {
    const auto padded = [](size_t size) { return (size + 7) / 8 * 8; };
    for (const auto& [kind, body] : header.messages) {
      if (kind != kAttribute) continue;
      const View view(body);
      if (view.number<uint8_t>(0) != 1) continue;  // of a form that invar does not write: as if there were none
      const size_t name = view.number<uint16_t>(2), type = view.number<uint16_t>(4), space = view.number<uint16_t>(6);
      const std::string_view text = view.text(8, name);
      StoredAttribute attribute;
      try {
        attribute.type = type_of(View(view.part(8 + padded(name), type)));
        attribute.elements = elements_of(shape_of(View(view.part(8 + padded(name) + padded(type), space))));
        const View value = view.from(8 + padded(name) + padded(type) + padded(space));
        const auto bytes = value.part(0, value.size());
        attribute.value.assign(bytes.begin(), bytes.end());
      } catch (const Damage& damage) {
        attribute.refused = damage.what;
      }
      structure_.attributes.emplace(text.substr(0, text.find('\0')), std::move(attribute));
    }
  }

  const InputFile& file_;
  int64_t left_;  // bytes of descriptions that may still be read
  std::string path_;
  Structure structure_;
};

}  // namespace

Structure read_structure(const InputFile& file) {
  return StructureParser(file).parse();
}

}  // namespace invar::hdf5
