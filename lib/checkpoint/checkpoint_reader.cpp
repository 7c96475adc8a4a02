#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "checkpoint/checksum.h"
#include "core/error.h"
#include "core/tensor.h"

namespace invar {

namespace {

constexpr size_t kOpenFiles = 16;
constexpr int kStripsAhead = 4;       // for each thread
constexpr int64_t kAtOnce = 1 << 16;  // elements: they stay in the cache from reading to summing and moving
constexpr const char* kRecopy = "copy the checkpoint again, or resume from another one (checkpoint.resume)";

bool is_moment(const std::string& tensor) {
  return tensor.starts_with("optimizer/");
}

// Calls body(item, buffer) for the items [0, n), taken in order by so many threads. Once one has failed the others end
// after what they are at, and the error of the first item that failed is thrown.
template <class Body>
void for_each_item(size_t n, int threads, Body body) {
  std::atomic<size_t> next = 0;
  std::mutex failing;
  size_t failed = n;
  std::exception_ptr error;
  const auto work = [&] {
    std::vector<float> buffer;
    for (size_t item = next++; item < n; item = next++) {
      try {
        body(item, buffer);
      } catch (...) {
        const std::lock_guard lock(failing);
        if (item < failed) std::tie(failed, error) = std::pair(item, std::current_exception());
        next = n;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (size_t i = 1; i < std::min(n, static_cast<size_t>(std::max(1, threads))); ++i) helpers.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

CheckpointReader::CheckpointReader(const std::filesystem::path& folder, Shards shards)
    : folder_(folder), index_(read_index(folder)), pieces_(index_.tensors.size()) {
  if (shards == Shards::kCheck) check_files(folder, index_);
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

void CheckpointReader::read(const StatePart& part, int threads) const {
  const bool moments = has_moments();
  const std::vector<StateExtent> extents = extents_of(part);
  std::vector<Strip> strips;
  for (const StateExtent& extent : extents) {
    if (moments || !is_moment(extent.tensor().name)) add_strips(extent, strips);
  }
  read_strips(std::move(strips), threads);
}

void CheckpointReader::read_rows(const std::string& tensor, Range rows, std::span<float> out) const {
  const StateTensor& stored = index_.tensors[find(tensor)];
  INVAR_CHECK(std::ssize(out) == rows.size() * stored.cols(), "'{}': {} rows into {} elements", tensor, rows.size(),
              out.size());
  if (out.empty()) return;
  const StateExtent extent(stored, {{0, rows, out.data()}});
  std::vector<Strip> strips;
  add_strips(extent, strips);
  read_strips(std::move(strips), 1);
}

void CheckpointReader::verify(int threads) const {
  std::vector<Strip> strips;
  for (const StoredPiece& piece : index_.pieces) add_strips(piece, piece.rectangle, nullptr, strips);
  check_files(folder_, index_);
  check_beside_values();
  read_strips(std::move(strips), threads);
}

size_t CheckpointReader::find(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  if (found != tensors_.end()) return found->second;
  throw Error(ErrorKind::kData, format("{}: no tensor '{}'", folder_.string(), tensor), "invar inspect lists them");
}

std::shared_ptr<const InputFile> CheckpointReader::shard(int rank) const {
  const std::lock_guard lock(opening_);
  const auto found = std::find_if(open_.begin(), open_.end(), [=](const OpenFile& open) { return open.rank == rank; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
    return open_.front().file;
  }
  const auto expected =
      std::find_if(index_.files.begin(), index_.files.end(), [=](const ShardFile& file) { return file.rank == rank; });
  open_.push_front({rank, open_shard(folder_, *expected)});
  if (open_.size() > kOpenFiles) open_.pop_back();
  return open_.front().file;
}

void CheckpointReader::add_strips(const StateExtent& extent, std::vector<Strip>& strips) const {
  int64_t found = 0;
  for (const size_t i : pieces_[find(extent.tensor().name)]) {
    const StoredPiece& piece = index_.pieces[i];
    const Rectangle wanted = intersect(piece.rectangle, extent.rectangle());
    if (wanted.rows.empty() || wanted.cols.empty()) continue;
    add_strips(piece, wanted, &extent, strips);
    found += wanted.elements();
  }
  INVAR_CHECK(found == extent.rectangle().elements(), "'{}': {} of {} elements are in the checkpoint",
              extent.tensor().name, found, extent.rectangle().elements());
}

// Those of the piece that cover `wanted`.
void CheckpointReader::add_strips(const StoredPiece& piece, const Rectangle& wanted, const StateExtent* extent,
                                  std::vector<Strip>& strips) {
  const auto on_tiles = [](Range part, Range whole, int64_t tile) {
    return Range{whole.begin + (part.begin - whole.begin) / tile * tile,
                 std::min(whole.end, whole.begin + round_up(part.end - whole.begin, tile))};
  };
  const Range rows = on_tiles(wanted.rows, piece.rectangle.rows, piece.tiling.rows);
  const Range cols = on_tiles(wanted.cols, piece.rectangle.cols, piece.tiling.cols);
  for (int64_t row = rows.begin; row < rows.end; row += piece.tiling.rows) {
    strips.push_back({&piece, {{row, std::min(row + piece.tiling.rows, rows.end)}, cols}, extent});
  }
}

// File by file, from first to last byte.
void CheckpointReader::read_strips(std::vector<Strip> strips, int threads) const {
  std::stable_sort(strips.begin(), strips.end(), [](const Strip& a, const Strip& b) {
    return std::pair(a.piece->rank, a.piece->offset) < std::pair(b.piece->rank, b.piece->offset);
  });
  const auto ahead = static_cast<size_t>(kStripsAhead * std::max(1, threads));
  for (size_t i = 0; i < std::min(ahead, strips.size()); ++i) read_ahead(strips[i]);
  for_each_item(strips.size(), threads, [&](size_t i, std::vector<float>& buffer) {
    if (i + ahead < strips.size()) read_ahead(strips[i + ahead]);
    read_strip(strips[i], buffer);
  });
}

// Several threads in one file look to the system as if nothing were read in sequence.
void CheckpointReader::read_ahead(const Strip& strip) const {
  const int64_t stored_cols = strip.piece->rectangle.cols.size();
  if (strip.area.cols.size() != stored_cols) return;  // a part of each row: what lies between is not wanted
  const int64_t first_row = strip.area.rows.begin - strip.piece->rectangle.rows.begin;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
  shard(strip.piece->rank)
      ->will_read(strip.piece->offset + first_row * stored_cols * kBytes, strip.area.elements() * kBytes);
}

void CheckpointReader::read_strip(const Strip& strip, std::vector<float>& buffer) const {
  const StoredPiece& piece = *strip.piece;
  const auto& [rows, cols] = strip.area;
  const int64_t stored_cols = piece.rectangle.cols.size();
  const auto file = shard(piece.rank);
  const auto offset_of = [&](int64_t row, int64_t col) {
    const int64_t element = (row - piece.rectangle.rows.begin) * stored_cols + col - piece.rectangle.cols.begin;
    return piece.offset + element * static_cast<int64_t>(sizeof(float));
  };
  StripSums sums(cols.size(), piece.tiling.cols);
  if (strip.extent != nullptr && sums.sums().size() == 1 && strip.extent->holds_rows_of(strip.area)) {
    int64_t offset = offset_of(rows.begin, cols.begin);
    for (const std::span<float> run : strip.extent->spans(rows)) {
      for (size_t at = 0; at < run.size(); at += kAtOnce) {
        const auto part = run.subspan(at, std::min<size_t>(kAtOnce, run.size() - at));
        file->read_at(offset, part);
        sums.add(part);
        offset += static_cast<int64_t>(part.size_bytes());
      }
    }
    return check_tiles(strip, sums);
  }
  const int64_t rows_at_once = std::max<int64_t>(1, kAtOnce / cols.size());
  for (int64_t row = rows.begin; row < rows.end; row += rows_at_once) {
    const Rectangle part{{row, std::min(row + rows_at_once, rows.end)}, cols};
    buffer.resize(static_cast<size_t>(part.elements()));
    const std::span<float> values(buffer);
    const int64_t rows_together = cols.size() == stored_cols ? part.rows.size() : 1;  // they lie in one piece
    for (int64_t r = part.rows.begin; r < part.rows.end; r += rows_together) {
      file->read_at(offset_of(r, cols.begin), values.subspan(static_cast<size_t>((r - part.rows.begin) * cols.size()),
                                                             static_cast<size_t>(rows_together * cols.size())));
    }
    sums.add(values);
    if (strip.extent != nullptr) strip.extent->scatter(part, values);
  }
  check_tiles(strip, sums);
}

void CheckpointReader::check_tiles(const Strip& strip, const StripSums& sums) const {
  const StoredPiece& piece = *strip.piece;
  const auto& [rows, cols] = strip.area;
  const int64_t first =
      (rows.begin - piece.rectangle.rows.begin) / piece.tiling.rows * piece.tiling.tiles_across(piece.rectangle) +
      (cols.begin - piece.rectangle.cols.begin) / piece.tiling.cols;
  const auto found = std::mismatch(sums.sums().begin(), sums.sums().end(), piece.checksums.begin() + first).first;
  if (found == sums.sums().end()) return;
  const int64_t col = cols.begin + (found - sums.sums().begin()) * piece.tiling.cols;
  throw Error(ErrorKind::kData,
              format("{}: tensor '{}', rows [{}, {}), columns [{}, {}): damaged, the checksum is not the one it was "
                     "written with",
                     (folder_ / ShardFile::name_of(piece.rank)).string(), index_.tensors[piece.tensor].name, rows.begin,
                     rows.end, col, std::min(col + piece.tiling.cols, cols.end)),
              kRecopy);
}

// What shards hold for HDF5. Format 1 has no sums of it.
void CheckpointReader::check_beside_values() const {
  if (index_.version == 1) return;
  std::map<int, std::vector<Range>> values;
  for (const StoredPiece& piece : index_.pieces) {
    values[piece.rank].push_back({piece.offset, piece.offset + piece.bytes()});
  }
  for (const ShardFile& file : index_.files) {
    if (sum_beside(*shard(file.rank), std::move(values[file.rank])) == file.rest) continue;
    throw Error(ErrorKind::kData,
                format("{}: damaged outside of its values, the checksum is not the one it was written with",
                       shard(file.rank)->path()),
                kRecopy);
  }
}

}  // namespace invar
