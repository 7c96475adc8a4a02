#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <set>

#include "checkpoint/checksum.h"
#include "core/error.h"
#include "core/tensor.h"

namespace invar {

namespace {

constexpr size_t kOpenFiles = 16;

bool is_moment(const std::string& tensor) {
  return tensor.starts_with("optimizer/");
}

// The values of an area inside a strip: where they lie, or, if only some of the columns are wanted, copied to `buffer`.
std::span<const float> cut(std::span<const float> values, const Rectangle& strip, const Rectangle& area,
                           std::vector<float>& buffer) {
  const int64_t width = area.cols.size();
  const int64_t first_row = area.rows.begin - strip.rows.begin;
  if (width == strip.cols.size()) {
    return values.subspan(static_cast<size_t>(first_row * width), static_cast<size_t>(area.elements()));
  }
  buffer.resize(static_cast<size_t>(area.elements()));
  for (int64_t row = 0; row < area.rows.size(); ++row) {
    const auto from = values.begin() + (first_row + row) * strip.cols.size() + area.cols.begin - strip.cols.begin;
    std::copy(from, from + width, buffer.begin() + row * width);
  }
  return buffer;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::filesystem::path& folder, Shards shards)
    : folder_(folder), index_(read_index(folder)), pieces_(index_.tensors.size()) {
  if (shards == Shards::kCheck) check_shards(folder, index_);
  for (size_t i = 0; i < index_.tensors.size(); ++i) tensors_[index_.tensors[i].name] = i;
  for (size_t i = 0; i < index_.pieces.size(); ++i) pieces_[index_.pieces[i].tensor].push_back(i);
}

bool CheckpointReader::has_moments() const {
  return std::any_of(tensors_.begin(), tensors_.end(), [](const auto& entry) { return is_moment(entry.first); });
}

void CheckpointReader::require(const std::vector<StateTensor>& tensors) const {
  const bool moments = has_moments();
  std::set<std::string> known;
  for (const StateTensor& tensor : tensors) {
    known.insert(tensor.name);
    if (is_moment(tensor.name) && !moments) continue;
    if (!contains(tensor.name)) {
      throw Error(ErrorKind::kData, format("{}: no tensor '{}', which the model has", folder_.string(), tensor.name),
                  "the checkpoint is of another model");
    }
    const StateTensor& stored = index_.tensors[find(tensor.name)];
    if (stored.shape == tensor.shape) continue;
    throw Error(ErrorKind::kData,
                format("{}: tensor '{}' has shape {}, the model needs {}", folder_.string(), tensor.name,
                       describe_shape(stored.shape), describe_shape(tensor.shape)),
                "the checkpoint is of another model");
  }
  for (const StateTensor& stored : index_.tensors) {
    if (known.contains(stored.name)) continue;
    throw Error(ErrorKind::kData, format("{}: the model has no tensor '{}'", folder_.string(), stored.name),
                "the checkpoint is of another model");
  }
}

void CheckpointReader::read(const StatePart& part) const {
  const bool moments = has_moments();
  for (const StateExtent& extent : extents_of(part)) {
    if (moments || !is_moment(extent.tensor().name)) read_extent(extent);
  }
}

void CheckpointReader::read_rows(const std::string& tensor, Range rows, std::span<float> out) const {
  const StateTensor& stored = index_.tensors[find(tensor)];
  INVAR_CHECK(std::ssize(out) == rows.size() * stored.cols(), "'{}': {} rows into {} elements", tensor, rows.size(),
              out.size());
  if (!out.empty()) read_extent(StateExtent(stored, {{0, rows, out.data()}}));
}

void CheckpointReader::verify() const {
  for (const StoredPiece& piece : index_.pieces) {
    for_each_strip(piece, piece.rectangle, [](const Rectangle&, std::span<const float>) {});
  }
}

size_t CheckpointReader::find(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  if (found != tensors_.end()) return found->second;
  throw Error(ErrorKind::kData, format("{}: no tensor '{}'", folder_.string(), tensor), "invar inspect lists them");
}

const Hdf5Reader& CheckpointReader::shard(int rank) const {
  const auto found = std::find_if(open_.begin(), open_.end(), [=](const OpenFile& open) { return open.rank == rank; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    open_.push_front({rank, std::make_unique<Hdf5Reader>(folder_ / ShardFile::name_of(rank))});
    if (open_.size() > kOpenFiles) open_.pop_back();
  }
  return *open_.front().file;
}

void CheckpointReader::read_extent(const StateExtent& extent) const {
  const size_t tensor = find(extent.tensor().name);
  std::vector<float> cut_values;
  int64_t found = 0;
  for (const size_t i : pieces_[tensor]) {
    const StoredPiece& piece = index_.pieces[i];
    const Rectangle wanted = intersect(piece.rectangle, extent.rectangle());
    if (wanted.elements() == 0) continue;
    for_each_strip(piece, wanted, [&](const Rectangle& strip, std::span<const float> tiles) {
      const Rectangle area = intersect(strip, wanted);
      extent.scatter(area, cut(tiles, strip, area, cut_values));
      found += area.elements();
    });
  }
  if (found == extent.rectangle().elements()) return;
  throw Error(ErrorKind::kData,
              format("{}: '{}': {} of {} elements are in its shards", folder_.string(), extent.tensor().name, found,
                     extent.rectangle().elements()),
              "the index does not cover the tensor; resume from another checkpoint");
}

template <class Use>
void CheckpointReader::for_each_strip(const StoredPiece& piece, const Rectangle& area, Use use) const {
  const Hdf5Reader& file = shard(piece.rank);
  const std::string name = dataset_name(index_.tensors[piece.tensor], piece.rectangle);
  const auto& [rows, cols] = piece.rectangle;
  const auto on_tiles = [](Range wanted, Range whole, int64_t tile) {
    return Range{whole.begin + (wanted.begin - whole.begin) / tile * tile,
                 std::min(whole.end, whole.begin + round_up(wanted.end - whole.begin, tile))};
  };
  const Range wanted_rows = on_tiles(area.rows, rows, piece.tiling.rows);
  const Range wanted_cols = on_tiles(area.cols, cols, piece.tiling.cols);
  for (int64_t row = wanted_rows.begin; row < wanted_rows.end; row += piece.tiling.rows) {
    const Rectangle strip{{row, std::min(row + piece.tiling.rows, wanted_rows.end)}, wanted_cols};
    strip_.resize(static_cast<size_t>(strip.elements()));
    file.read_rectangle(name, {strip.rows.begin - rows.begin, strip.rows.end - rows.begin},
                        {strip.cols.begin - cols.begin, strip.cols.end - cols.begin}, strip_);
    check_tiles(piece, strip, strip_);
    use(strip, std::span<const float>(strip_));
  }
}

void CheckpointReader::check_tiles(const StoredPiece& piece, const Rectangle& strip,
                                   std::span<const float> values) const {
  const auto& [rows, cols] = piece.rectangle;
  const int64_t width = strip.cols.size();
  const int64_t first =
      (strip.rows.begin - rows.begin) / piece.tiling.rows * piece.tiling.tiles_across(piece.rectangle) +
      (strip.cols.begin - cols.begin) / piece.tiling.cols;
  for (int64_t col = 0, tile = first; col < width; col += piece.tiling.cols, ++tile) {
    const Range tile_cols{col, std::min(col + piece.tiling.cols, width)};
    if (tile_checksum(values, width, tile_cols) == piece.checksums[static_cast<size_t>(tile)]) continue;
    throw Error(
        ErrorKind::kData,
        format("{}: tensor '{}', rows [{}, {}), columns [{}, {}): damaged, the checksum is not the one it was "
               "written with",
               (folder_ / ShardFile::name_of(piece.rank)).string(), index_.tensors[piece.tensor].name, strip.rows.begin,
               strip.rows.end, strip.cols.begin + tile_cols.begin, strip.cols.begin + tile_cols.end),
        "copy the checkpoint again, or resume from another one (checkpoint.resume)");
  }
}

}  // namespace invar
