#include "checkpoint/index_hdf5.h"

#include "checkpoint/checksum.h"
#include "checkpoint/hdf5_file.h"
#include "core/error.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFormat = "invar checkpoint";

// Tables of format 1: rows of int64.
constexpr const char* kTensors = "index/tensors";  // names
constexpr const char* kShapes = "index/shapes";    // rows, columns; columns −1: one dim
constexpr const char* kFiles = "index/files";      // rank, bytes
constexpr const char* kPieces = "index/pieces";    // tensor, rank, rectangle (4), tile rows and columns, first checksum
constexpr const char* kChecksums = "index/checksums";  // of all tiles of all pieces
constexpr int64_t kPieceCols = 9;

constexpr const char* kRecopy = "copy the checkpoint again, or resume from another one";

[[noreturn]] void fail(const fs::path& path, const std::string& what, const std::string& hint = kRecopy) {
  throw Error(ErrorKind::kData, format("{}: {}", path.string(), what), hint);
}

void write_virtual_datasets(Hdf5Writer& file, const CheckpointIndex& index) {
  std::vector<std::vector<Hdf5Source>> sources(index.tensors.size());
  for (const StoredPiece& piece : index.pieces) {
    const StateTensor& tensor = index.tensors[piece.tensor];
    const auto& [rows, cols] = piece.rectangle;
    Hdf5Source source{ShardFile::name_of(piece.rank),
                      dataset_name(tensor, piece.rectangle),
                      {rows.begin, cols.begin},
                      {rows.size(), cols.size()}};
    source.start.resize(tensor.shape.size());
    source.shape.resize(tensor.shape.size());
    sources[piece.tensor].push_back(std::move(source));
  }
  for (size_t i = 0; i < index.tensors.size(); ++i) {
    file.create_virtual(index.tensors[i].name, DType::kF32, index.tensors[i].shape, sources[i]);
  }
}

void write_info(Hdf5Writer& file, const CheckpointIndex& index) {
  const CheckpointInfo& info = index.info;
  file.set_attribute("format", kFormat);
  file.set_attribute("format_version", index.version);
  file.set_attribute("step", info.step);
  file.set_attribute("samples", info.samples);
  file.set_attribute("tokens", info.tokens);
  file.set_attribute("skipped_steps", info.skipped_steps);
  file.set_attribute("evaluation_due", int64_t{info.evaluation_due});
  file.write_strings("config", std::span(&info.config, 1));  // of any length, which an attribute's is not
  file.set_attribute("layout", info.layout);
  file.set_attribute("contract", info.contract);
  file.set_attribute("contract_hash", info.contract_hash);
}

CheckpointInfo read_info(const Hdf5Reader& file, const fs::path& path) {
  if (file.text_attribute("format") != kFormat) fail(path, "not an index of an invar checkpoint");
  if (const int64_t version = file.integer_attribute("format_version").value_or(0); version != 1) {
    fail(path, format("format version {} without an index.bin; only version 1 has none", version));
  }
  const auto number = [&](const char* name) { return file.integer_attribute(name).value_or(0); };
  const auto text = [&](const char* name) { return file.text_attribute(name).value_or(""); };
  return {number("step"), number("samples"), number("tokens"), number("skipped_steps"), number("evaluation_due") != 0,
          text("config"), text("layout"),    text("contract"), text("contract_hash")};
}

std::vector<int64_t> read_table(const Hdf5Reader& file, const fs::path& path, const std::string& name, int64_t cols) {
  const Hdf5Info info = file.info(name);
  if (info.cols() != cols) fail(path, format("'{}' has {} columns, not {}", name, info.cols(), cols));
  std::vector<int64_t> values(static_cast<size_t>(info.rows() * cols));
  file.read_rows<int64_t>(name, {0, info.rows()}, values);
  return values;
}

int rank_of(int64_t number, const fs::path& path) {
  if (!std::in_range<int>(number)) fail(path, format("rank {} is out of range", number));
  return static_cast<int>(number);
}

void read_tables(const Hdf5Reader& file, const fs::path& path, CheckpointIndex& index) {
  const std::vector<std::string> names = file.read_strings(kTensors);
  const std::vector<int64_t> shapes = read_table(file, path, kShapes, 2);
  if (shapes.size() != 2 * names.size()) fail(path, "has not as many shapes as tensors");
  for (size_t i = 0; i < names.size(); ++i) {
    StateTensor& tensor = index.tensors.emplace_back();
    tensor.name = names[i];
    tensor.shape = {shapes[2 * i]};
    if (shapes[2 * i + 1] != -1) tensor.shape.push_back(shapes[2 * i + 1]);
  }
  const std::vector<int64_t> files = read_table(file, path, kFiles, 2);
  for (size_t i = 0; i < files.size(); i += 2) index.files.push_back({rank_of(files[i], path), files[i + 1], 0});
  const std::vector<int64_t> checksums = read_table(file, path, kChecksums, 1);
  const std::vector<int64_t> pieces = read_table(file, path, kPieces, kPieceCols);
  int64_t end = std::ssize(checksums);  // of a piece's sums: where those of the next begin
  for (auto row = pieces.end(); row != pieces.begin();) {
    row -= kPieceCols;
    if (row[0] < 0 || row[0] >= std::ssize(names))
      fail(path, format("a piece of tensor {} of {}", row[0], names.size()));
    if (row[8] < 0 || row[8] > end) fail(path, "its checksums are out of order");
    index.pieces.push_back({static_cast<size_t>(row[0]),
                            rank_of(row[1], path),
                            {{row[2], row[3]}, {row[4], row[5]}},
                            {row[6], row[7]},
                            0,
                            {checksums.begin() + row[8], checksums.begin() + end}});
    end = row[8];
  }
}

// Where the pieces of a shard lie, which format 1 left to HDF5.
void find_pieces(const fs::path& path, const ShardFile& shard, CheckpointIndex& index) {
  const Hdf5Reader file(path);
  if (file.file_size() != shard.bytes) {
    fail(path, format("has {} bytes, was written with {}", file.file_size(), shard.bytes));
  }
  for (StoredPiece& piece : index.pieces) {
    if (piece.rank != shard.rank) continue;
    const StateTensor& tensor = index.tensors[piece.tensor];
    const std::string name = dataset_name(tensor, piece.rectangle);
    std::vector<int64_t> shape = {piece.rectangle.rows.size(), piece.rectangle.cols.size()};
    shape.resize(tensor.shape.size());
    const Hdf5Info info = file.info(name);
    if (info.dtype != DType::kF32 || info.shape != shape) {
      fail(path, format("dataset '{}' is {} {}, f32 {} in the index", shown(name), name_of(info.dtype),
                        describe_shape(info.shape), describe_shape(shape)));
    }
    piece.offset = file.offset_of(name);
  }
}

// The sum of the whole file, before a byte of it is used.
void check_sum(const fs::path& path, const fs::path& sum_path, CheckpointIndex& index) {
  const std::string text = read_text_file(sum_path.string(), 100, kRecopy);
  const InputFile file(path.string(), kRecopy);
  index.hdf5_bytes = file.size();
  index.hdf5_sum = crc32_of(file, {0, file.size()});
  const size_t blank = text.find(' ');
  if (text.substr(0, blank) != std::to_string(file.size())) {
    fail(path, format("has {} bytes, was written with {}", file.size(), shown(text.substr(0, blank))));
  }
  if (text != format("{} {:08x}\n", file.size(), index.hdf5_sum)) {
    fail(path, "its checksum is not the one it was written with: damaged");
  }
}

}  // namespace

void write_hdf5_index(const fs::path& path, const CheckpointIndex& index) {
  Hdf5Writer file(path);
  write_info(file, index);
  write_virtual_datasets(file, index);
  file.finish();
}

CheckpointIndex read_hdf5_index(const fs::path& path, const fs::path& sum_path) {
  CheckpointIndex index;
  index.version = 1;
  check_sum(path, sum_path, index);
  const Hdf5Reader file(path);
  index.info = read_info(file, path);
  read_tables(file, path, index);
  for (const ShardFile& shard : index.files) {
    find_pieces(path.parent_path() / ShardFile::name_of(shard.rank), shard, index);
  }
  check_index(index, path.string());
  return index;
}

}  // namespace invar
