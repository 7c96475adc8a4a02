#include "checkpoint/checkpoint_index.h"

#include <fstream>
#include <numeric>
#include <sstream>

#include "checkpoint/checksum.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/run_directory.h"
#include "core/error.h"
#include "core/pending_file.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr const char* kChecksumFile = "index.crc32";
constexpr const char* kFormat = "invar checkpoint";
constexpr int64_t kVersion = 1;

// Tables of int64 rows.
constexpr const char* kTensors = "index/tensors";  // names
constexpr const char* kShapes = "index/shapes";    // rows, columns; columns −1: one dim
constexpr const char* kFiles = "index/files";      // rank, bytes
constexpr const char* kPieces = "index/pieces";    // tensor, rank, rectangle (4), tile rows and columns, first checksum
constexpr const char* kChecksums = "index/checksums";  // of all tiles of all pieces
constexpr int64_t kPieceCols = 9;

constexpr const char* kRecopy = "copy the checkpoint again, or resume from another one";

void write_table(Hdf5Writer& file, const std::string& name, int64_t cols, const std::vector<int64_t>& values) {
  const std::vector<int64_t> shape = {std::ssize(values) / cols, cols};
  file.write<int64_t>(name, shape, values);
}

std::vector<int64_t> read_table(const Hdf5Reader& file, const std::string& name, int64_t cols) {
  const Hdf5Info info = file.info(name);
  INVAR_CHECK(info.cols() == cols, "{} has {} columns, not {}", name, info.cols(), cols);
  std::vector<int64_t> values(static_cast<size_t>(info.rows() * cols));
  file.read_rows<int64_t>(name, {0, info.rows()}, values);
  return values;
}

void check_cover(const CheckpointIndex& index) {
  std::vector<int64_t> covered(index.tensors.size());
  for (const StoredPiece& piece : index.pieces) covered[piece.tensor] += piece.rectangle.elements();
  for (size_t i = 0; i < index.tensors.size(); ++i) {
    const StateTensor& tensor = index.tensors[i];
    INVAR_CHECK(covered[i] == tensor.rows() * tensor.cols(), "'{}': {} elements written, its shape is {}", tensor.name,
                covered[i], describe_shape(tensor.shape));
  }
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

void write_tables(Hdf5Writer& file, const CheckpointIndex& index) {
  std::vector<std::string> names;
  std::vector<int64_t> shapes;
  for (const StateTensor& tensor : index.tensors) {
    names.push_back(tensor.name);
    shapes.insert(shapes.end(), {tensor.shape[0], tensor.shape.size() == 1 ? -1 : tensor.shape[1]});
  }
  std::vector<int64_t> files;
  for (const ShardFile& shard : index.files) files.insert(files.end(), {shard.rank, shard.bytes});
  std::vector<int64_t> pieces;
  std::vector<int64_t> checksums;
  for (const StoredPiece& piece : index.pieces) {
    const auto& [rows, cols] = piece.rectangle;
    pieces.insert(pieces.end(), {static_cast<int64_t>(piece.tensor), piece.rank, rows.begin, rows.end, cols.begin,
                                 cols.end, piece.tiling.rows, piece.tiling.cols, std::ssize(checksums)});
    checksums.insert(checksums.end(), piece.checksums.begin(), piece.checksums.end());
  }
  file.write_strings(kTensors, names);
  write_table(file, kShapes, 2, shapes);
  write_table(file, kFiles, 2, files);
  write_table(file, kPieces, kPieceCols, pieces);
  write_table(file, kChecksums, 1, checksums);
}

void write_info(Hdf5Writer& file, const CheckpointInfo& info) {
  file.set_attribute("format", kFormat);
  file.set_attribute("format_version", kVersion);
  file.set_attribute("step", info.step);
  file.set_attribute("samples", info.samples);
  file.set_attribute("tokens", info.tokens);
  file.set_attribute("skipped_steps", info.skipped_steps);
  file.set_attribute("evaluation_due", int64_t{info.evaluation_due});
  file.set_attribute("config", info.config);
  file.set_attribute("layout", info.layout);
  file.set_attribute("contract", info.contract);
  file.set_attribute("contract_hash", info.contract_hash);
}

CheckpointInfo read_info(const Hdf5Reader& file, const fs::path& path) {
  if (file.text_attribute("format") != kFormat) {
    throw Error(ErrorKind::kData, format("{}: not an index of an invar checkpoint", path.string()), kRecopy);
  }
  if (const int64_t version = file.integer_attribute("format_version").value_or(0); version != kVersion) {
    throw Error(ErrorKind::kData,
                format("{}: format version {}; this invar reads version {}", path.string(), version, kVersion),
                "use the invar that wrote it");
  }
  CheckpointInfo info;
  info.step = file.integer_attribute("step").value_or(0);
  info.samples = file.integer_attribute("samples").value_or(0);
  info.tokens = file.integer_attribute("tokens").value_or(0);
  info.skipped_steps = file.integer_attribute("skipped_steps").value_or(0);
  info.evaluation_due = file.integer_attribute("evaluation_due").value_or(0) != 0;
  info.config = file.text_attribute("config").value_or("");
  info.layout = file.text_attribute("layout").value_or("");
  info.contract = file.text_attribute("contract").value_or("");
  info.contract_hash = file.text_attribute("contract_hash").value_or("");
  return info;
}

// The whole file is summed before the library parses a byte of it.
void check_index_file(const fs::path& folder) {
  const fs::path path = folder / kIndexFile;
  std::error_code error;
  const uintmax_t found = fs::file_size(path, error);
  if (error) {
    throw Error(ErrorKind::kData, format("{}: {}, so it is no checkpoint", path.string(), error.message()), kRecopy);
  }
  std::ifstream stream(folder / kChecksumFile);
  uintmax_t size = 0;
  std::string sum;
  if (!(stream >> size >> sum)) {
    throw Error(ErrorKind::kData, format("{}: missing or not readable", (folder / kChecksumFile).string()), kRecopy);
  }
  if (found != size) {
    throw Error(ErrorKind::kData, format("{}: has {} bytes, was written with {}", path.string(), found, size), kRecopy);
  }
  if (format("{:08x}", crc32_of_file(path)) != sum) {
    throw Error(ErrorKind::kData, format("{}: its checksum is not the one it was written with: damaged", path.string()),
                kRecopy);
  }
}

void read_tables(const Hdf5Reader& file, CheckpointIndex& index) {
  const std::vector<std::string> names = file.read_strings(kTensors);
  const std::vector<int64_t> shapes = read_table(file, kShapes, 2);
  for (size_t i = 0; i < names.size(); ++i) {
    StateTensor tensor;
    tensor.name = names[i];
    tensor.shape = {shapes[2 * i]};
    if (shapes[2 * i + 1] >= 0) tensor.shape.push_back(shapes[2 * i + 1]);
    index.tensors.push_back(std::move(tensor));
  }
  const std::vector<int64_t> files = read_table(file, kFiles, 2);
  for (size_t i = 0; i < files.size(); i += 2) index.files.push_back({static_cast<int>(files[i]), files[i + 1]});
  const std::vector<int64_t> checksums = read_table(file, kChecksums, 1);
  const std::vector<int64_t> pieces = read_table(file, kPieces, kPieceCols);
  for (auto row = pieces.begin(); row != pieces.end(); row += kPieceCols) {
    StoredPiece piece{static_cast<size_t>(row[0]),
                      static_cast<int>(row[1]),
                      {{row[2], row[3]}, {row[4], row[5]}},
                      {row[6], row[7]},
                      {}};
    const auto first = checksums.begin() + row[8];
    piece.checksums.assign(first, first + piece.tiling.count(piece.rectangle));
    index.pieces.push_back(std::move(piece));
  }
}

}  // namespace

int64_t CheckpointIndex::bytes() const {
  return std::accumulate(files.begin(), files.end(), int64_t{0},
                         [](int64_t sum, const ShardFile& file) { return sum + file.bytes; });
}

void write_index(const fs::path& folder, const CheckpointIndex& index) {
  check_cover(index);
  const fs::path path = folder / kIndexFile;
  Hdf5Writer file(path);
  write_info(file, index.info);
  write_tables(file, index);
  write_virtual_datasets(file, index);
  file.finish();
  const std::string sum = format("{} {:08x}\n", fs::file_size(path), crc32_of_file(path));
  PendingFile beside(folder / kChecksumFile);
  beside.write_at(std::as_bytes(std::span(sum)), 0);
  beside.publish();
}

CheckpointIndex read_index(const fs::path& folder) {
  check_index_file(folder);
  const Hdf5Reader file(folder / kIndexFile);
  CheckpointIndex index;
  index.info = read_info(file, folder / kIndexFile);
  read_tables(file, index);
  return index;
}

void check_shards(const fs::path& folder, const CheckpointIndex& index) {
  for (const ShardFile& file : index.files) {
    const fs::path path = folder / ShardFile::name_of(file.rank);
    std::error_code error;
    const uintmax_t size = fs::file_size(path, error);
    if (error) throw Error(ErrorKind::kData, format("{}: {}", path.string(), error.message()), kRecopy);
    if (size != static_cast<uintmax_t>(file.bytes)) {
      throw Error(ErrorKind::kData, format("{}: has {} bytes, was written with {}", path.string(), size, file.bytes),
                  kRecopy);
    }
  }
}

}  // namespace invar
