#include "checkpoint/index_table.h"

#include <concepts>
#include <cstring>
#include <type_traits>

#include "checkpoint/checksum.h"
#include "core/damage.h"
#include "core/error.h"

namespace invar {
namespace {

constexpr std::string_view kSignature = "invar checkpoint\n";
constexpr int64_t kVersion = 2;
static_assert(kIndexHead == kSignature.size() + sizeof(int64_t));
constexpr const char* kRecopy = "copy the checkpoint again, or resume from another one (checkpoint.resume)";

// The fields of every record, once for writing and reading: `io` is given each in turn.
template <class Record, class T>
concept OneOf = std::same_as<std::remove_const_t<Record>, T>;

void fields(auto& io, OneOf<Range> auto& range) {
  io(range.begin, range.end);
}
void fields(auto& io, OneOf<CheckpointInfo> auto& info) {
  io(info.step, info.samples, info.tokens, info.skipped_steps, info.evaluation_due, info.config, info.layout,
     info.contract, info.contract_hash);
}
void fields(auto& io, OneOf<StateTensor> auto& tensor) {
  io(tensor.name, tensor.shape);
}
void fields(auto& io, OneOf<ShardFile> auto& file) {
  io(file.rank, file.bytes, file.rest);
}
void fields(auto& io, OneOf<StoredPiece> auto& piece) {
  io(piece.tensor, piece.rank, piece.rectangle.rows, piece.rectangle.cols, piece.tiling.rows, piece.tiling.cols,
     piece.offset, piece.checksums);
}
void fields(auto& io, OneOf<WrittenShard> auto& shard) {
  io(shard.file, shard.pieces);
}
void fields(auto& io, OneOf<CheckpointIndex> auto& index) {
  io(index.info, index.hdf5_bytes, index.hdf5_sum, index.tensors, index.files, index.pieces);
}

class Writer {
 public:
  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  void raw(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  void put(uint32_t sum) { raw(std::as_bytes(std::span(&sum, 1))); }
  void put(std::integral auto number) {
    const auto wide = static_cast<int64_t>(number);
    raw(std::as_bytes(std::span(&wide, 1)));
  }
  void put(const std::string& text) {
    put(text.size());
    raw(std::as_bytes(std::span(text)));
  }
  template <class T>
  void put(const std::vector<T>& list) {
    put(list.size());
    for (const T& item : list) put(item);
  }
  template <class Record>
  requires std::is_class_v<Record>
  void put(const Record& record) { fields(*this, record); }

  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> take(size_t size) {
    if (size > bytes_.size()) throw Damage{"ends too early"};
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  void get(uint32_t& sum) { std::memcpy(&sum, take(sizeof(sum)).data(), sizeof(sum)); }
  template <std::integral T>
  void get(T& number) {
    int64_t wide = 0;
    std::memcpy(&wide, take(sizeof(wide)).data(), sizeof(wide));
    number = static_cast<T>(wide);
    if ((wide < 0 && std::unsigned_integral<T>) || static_cast<int64_t>(number) != wide) {
      throw Damage{format("the number {} is out of range", wide)};
    }
  }
  void get(std::string& text) {
    size_t size = 0;
    get(size);
    const auto letters = take(size);
    text.assign(reinterpret_cast<const char*>(letters.data()), letters.size());
  }
  // A list grows as its items come, so that a wrong count takes no memory.
  template <class T>
  void get(std::vector<T>& list) {
    size_t size = 0;
    get(size);
    for (size_t i = 0; i < size; ++i) get(list.emplace_back());
  }
  template <class Record>
  requires std::is_class_v<Record>
  void get(Record& record) { fields(*this, record); }

  std::span<const std::byte> bytes_;
};

[[noreturn]] void fail(const std::string& path, const std::string& what, const std::string& hint) {
  throw Error(ErrorKind::kData, format("{}: {}", path, what), hint);
}

}  // namespace

std::vector<std::byte> encode_index(const CheckpointIndex& index) {
  Writer writer;
  writer.raw(std::as_bytes(std::span(kSignature)));
  writer(kVersion, index);
  writer(crc32(writer.bytes()));
  return std::move(writer.bytes());
}

int64_t check_index_head(std::span<const std::byte> bytes, const std::string& path) {
  if (std::ssize(bytes) < kIndexHead || std::memcmp(bytes.data(), kSignature.data(), kSignature.size()) != 0) {
    fail(path, "not the index of an invar checkpoint", kRecopy);
  }
  int64_t version = 0;
  std::memcpy(&version, bytes.data() + kSignature.size(), sizeof(version));
  if (version != kVersion) {
    fail(path, format("format version {}; this invar reads versions 1 and {}", version, kVersion),
         "use the invar that wrote it");
  }
  return version;
}

CheckpointIndex decode_index(std::span<const std::byte> bytes, const std::string& path) {
  CheckpointIndex index;
  index.version = check_index_head(bytes, path);
  uint32_t sum = 0;
  if (bytes.size() < kIndexHead + sizeof(sum)) fail(path, "not the index of an invar checkpoint", kRecopy);
  const auto summed = bytes.first(bytes.size() - sizeof(sum));
  std::memcpy(&sum, bytes.data() + summed.size(), sizeof(sum));
  if (crc32(summed) != sum) fail(path, "damaged, its checksum is not the one it was written with", kRecopy);
  Reader reader(summed.subspan(kIndexHead));
  try {
    reader(index);
    if (reader.left() > 0) throw Damage{"has bytes after its end"};
  } catch (const Damage& damage) {
    fail(path, damage.what, kRecopy);
  }
  check_index(index, path);
  return index;
}

std::vector<int64_t> encode_shard(const WrittenShard& shard) {
  Writer writer;
  writer(shard);
  std::vector<int64_t> numbers(static_cast<size_t>(ceil_div(std::ssize(writer.bytes()), sizeof(int64_t))));
  std::memcpy(numbers.data(), writer.bytes().data(), writer.bytes().size());
  return numbers;
}

WrittenShard decode_shard(std::span<const int64_t> numbers) {
  WrittenShard shard;
  try {
    Reader(std::as_bytes(numbers))(shard);
  } catch (const Damage& damage) {
    throw Error(ErrorKind::kFault, format("what another rank says of its shard is wrong: {}", damage.what));
  }
  return shard;
}

}  // namespace invar
