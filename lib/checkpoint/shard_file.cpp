#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/hdf5_file.h"
#include "core/error.h"

namespace invar {
std::string dataset_name(const StateTensor& tensor, const Rectangle& rectangle) {
  return format("{}@{},{}", tensor.name, rectangle.rows.begin, rectangle.cols.begin);
}

ShardWriter::ShardWriter(const std::filesystem::path& folder, int rank)
    : path_(folder / ShardFile::name_of(rank)), file_(std::make_unique<Hdf5Writer>(path_)), shard_{{rank, 0, 0}, {}} {}

ShardWriter::~ShardWriter() = default;

void ShardWriter::add(const StateExtent& extent) {
  const Rectangle& rectangle = extent.rectangle();
  const Tiling tiling = Tiling::of(rectangle, extent.tensor().transposed);
  StoredPiece piece{extent.index(), shard_.file.rank, rectangle, tiling, 0, {}};
  const std::string name = dataset_name(extent.tensor(), rectangle);
  std::vector<int64_t> shape = {rectangle.rows.size(), rectangle.cols.size()};
  shape.resize(extent.tensor().shape.size());
  file_->create(name, DType::kF32, shape);
  for (int64_t row = rectangle.rows.begin; row < rectangle.rows.end; row += tiling.rows) {
    const Range strip{row, std::min(row + tiling.rows, rectangle.rows.end)};
    strip_.resize(static_cast<size_t>(strip.size() * rectangle.cols.size()));
    extent.gather({strip, rectangle.cols}, strip_);
    StripSums sums(rectangle.cols.size(), tiling.cols);
    sums.add(strip_);
    piece.checksums.insert(piece.checksums.end(), sums.sums().begin(), sums.sums().end());
    file_->write_rows<float>(name, row - rectangle.rows.begin, strip_);
  }
  piece.offset = file_->offset_of(name);
  shard_.pieces.push_back(std::move(piece));
}

WrittenShard ShardWriter::finish() {
  file_->finish();
  const InputFile file(path_.string(), "", ErrorKind::kFault);
  shard_.file.bytes = file.size();
  std::vector<Range> values;
  for (const StoredPiece& piece : shard_.pieces) values.push_back({piece.offset, piece.offset + piece.bytes()});
  shard_.file.rest = sum_beside(file, std::move(values));
  return std::move(shard_);
}

WrittenShard write_shard(const std::filesystem::path& folder, int rank, const StatePart& part) {
  const std::vector<StateExtent> extents = extents_of(part);
  if (extents.empty()) return {{rank, 0, 0}, {}};
  ShardWriter writer(folder, rank);
  for (const StateExtent& extent : extents) writer.add(extent);
  return writer.finish();
}

}  // namespace invar
