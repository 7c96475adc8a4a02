#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/checksum.h"
#include "checkpoint/hdf5_file.h"
#include "core/error.h"

namespace invar {
namespace {

void add_checksums(StoredPiece& piece, std::span<const float> strip) {
  const int64_t width = piece.rectangle.cols.size();
  for (int64_t col = 0; col < width; col += piece.tiling.cols) {
    piece.checksums.push_back(tile_checksum(strip, width, {col, std::min(col + piece.tiling.cols, width)}));
  }
}

}  // namespace

std::string dataset_name(const StateTensor& tensor, const Rectangle& rectangle) {
  return format("{}@{},{}", tensor.name, rectangle.rows.begin, rectangle.cols.begin);
}

ShardWriter::ShardWriter(const std::filesystem::path& folder, int rank)
    : path_(folder / ShardFile::name_of(rank)), file_(std::make_unique<Hdf5Writer>(path_)), shard_{{rank, 0}, {}} {}

ShardWriter::~ShardWriter() = default;

void ShardWriter::add(const StateExtent& extent) {
  const Rectangle& rectangle = extent.rectangle();
  const Tiling tiling = Tiling::of(rectangle, extent.tensor().transposed);
  StoredPiece piece{extent.index(), shard_.file.rank, rectangle, tiling, {}};
  const std::string name = dataset_name(extent.tensor(), rectangle);
  std::vector<int64_t> shape = {rectangle.rows.size(), rectangle.cols.size()};
  shape.resize(extent.tensor().shape.size());
  file_->create(name, DType::kF32, shape);
  for (int64_t row = rectangle.rows.begin; row < rectangle.rows.end; row += tiling.rows) {
    const Range strip{row, std::min(row + tiling.rows, rectangle.rows.end)};
    strip_.resize(static_cast<size_t>(strip.size() * rectangle.cols.size()));
    extent.gather({strip, rectangle.cols}, strip_);
    add_checksums(piece, strip_);
    file_->write_rows<float>(name, row - rectangle.rows.begin, strip_);
  }
  shard_.pieces.push_back(std::move(piece));
}

WrittenShard ShardWriter::finish() {
  file_->finish();
  shard_.file.bytes = static_cast<int64_t>(std::filesystem::file_size(path_));
  return std::move(shard_);
}

WrittenShard write_shard(const std::filesystem::path& folder, int rank, const StatePart& part) {
  const std::vector<StateExtent> extents = extents_of(part);
  if (extents.empty()) return {{rank, 0}, {}};
  ShardWriter writer(folder, rank);
  for (const StateExtent& extent : extents) writer.add(extent);
  return writer.finish();
}

}  // namespace invar
