#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/checkpoint_index.h"
#include "core/error.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar {
namespace {

bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
}

// Texts end up in messages and on terminals.
bool is_line(const std::string& text) {
  return std::none_of(text.begin(), text.end(), is_control);
}
bool is_text(const std::string& text) {
  return std::none_of(text.begin(), text.end(), [](char c) { return is_control(c) && c != '\n' && c != '\t'; });
}

class IndexChecker {
 public:
  IndexChecker(const CheckpointIndex& index, const std::string& path, ErrorKind kind)
      : index_(index), path_(path), kind_(kind) {}

  void check() {
    const CheckpointInfo& info = index_.info;
    require(info.step >= 0 && info.samples >= 0 && info.tokens >= 0 && info.skipped_steps >= 0 &&
                info.skipped_steps <= info.step && index_.hdf5_bytes >= 0,
            "its step, samples or tokens are out of range");
    require(is_text(info.config) && is_line(info.layout) && is_text(info.contract) && is_line(info.contract_hash),
            "its texts hold control characters");
    check_tensors();
    for (const ShardFile& file : index_.files) {
      require(file.rank >= 0 && file.bytes >= 0 && files_.emplace(file.rank, &file).second,
              format("a file of rank {}, with {} bytes, or two of them", file.rank, file.bytes));
    }
    for (const StoredPiece& piece : index_.pieces) check_piece(piece);
    check_cover();
    check_places();
  }

 private:
  void require(bool right, const std::string& what) const {
    if (right) return;
    throw Error(kind_, format("{}: {}", path_, what),
                kind_ == ErrorKind::kData ? "copy the checkpoint again, or resume from another one" : "");
  }
  void require(bool right, const StoredPiece& piece, const char* what) const {
    if (right) return;
    const auto& [rows, cols] = piece.rectangle;
    require(false,
            format("tensor '{}', rows [{}, {}), columns [{}, {}) of rank {}: {}", index_.tensors[piece.tensor].name,
                   rows.begin, rows.end, cols.begin, cols.end, piece.rank, what));
  }

  void check_tensors() const {
    std::set<std::string> names;
    for (const StateTensor& tensor : index_.tensors) {
      const auto bytes = [&] {
        std::vector<int64_t> factors = tensor.shape;
        factors.push_back(sizeof(float));
        return checked_product(factors);
      };
      const bool is_shape = (tensor.shape.size() == 1 || tensor.shape.size() == 2) &&
                            std::all_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t n) { return n > 0; });
      require(!tensor.name.empty() && is_line(tensor.name), "a tensor without a name, or with control characters");
      require(is_shape && bytes(), format("tensor '{}' has no shape that can be", shown(tensor.name)));
      require(names.insert(tensor.name).second, format("tensor '{}' is there twice", shown(tensor.name)));
    }
  }

  void check_piece(const StoredPiece& piece) const {
    require(piece.tensor < index_.tensors.size(),
            format("a piece of tensor {} of {}", piece.tensor, index_.tensors.size()));
    const StateTensor& tensor = index_.tensors[piece.tensor];
    const auto& [rows, cols] = piece.rectangle;
    const auto inside = [](Range part, int64_t whole) {
      return part.begin >= 0 && part.begin < part.end && part.end <= whole;
    };
    require(inside(rows, tensor.rows()) && inside(cols, tensor.cols()), piece, "not inside its shape");
    const auto& [tile_rows, tile_cols] = piece.tiling;
    require(tile_rows > 0 && tile_rows <= rows.size() && tile_cols > 0 && tile_cols <= cols.size() &&
                (tile_rows == 1 || tile_rows <= Tiling::kStripElements / cols.size()),
            piece, "its tiles are of no size that can be");
    require(std::ssize(piece.checksums) == piece.tiling.count(piece.rectangle), piece,
            "not as many checksums as tiles");
    const auto file = files_.find(piece.rank);
    require(file != files_.end(), piece, "its file is not in the index");
    require(piece.offset >= 0 && piece.offset <= file->second->bytes - piece.bytes(), piece, "not inside its file");
  }

  // A rank has whole rows of a tensor, or whole columns.
  void check_cover() const {
    std::vector<std::vector<const StoredPiece*>> of_tensor(index_.tensors.size());
    for (const StoredPiece& piece : index_.pieces) of_tensor[piece.tensor].push_back(&piece);
    for (size_t i = 0; i < of_tensor.size(); ++i) {
      const StateTensor& tensor = index_.tensors[i];
      auto& pieces = of_tensor[i];
      const bool by_rows = std::all_of(pieces.begin(), pieces.end(), [&](const StoredPiece* piece) {
        return piece->rectangle.cols == Range{0, tensor.cols()};
      });
      const auto run = [&](const StoredPiece* piece) {
        return by_rows ? piece->rectangle.rows : piece->rectangle.cols;
      };
      std::sort(pieces.begin(), pieces.end(),
                [&](const StoredPiece* a, const StoredPiece* b) { return run(a).begin < run(b).begin; });
      int64_t end = 0;
      for (const StoredPiece* piece : pieces) {
        require(by_rows || piece->rectangle.rows == Range{0, tensor.rows()}, *piece, "neither whole rows nor columns");
        require(run(piece).begin == end, *piece,
                run(piece).begin < end ? "written twice" : "what is before is missing");
        end = run(piece).end;
      }
      require(end == (by_rows ? tensor.rows() : tensor.cols()),
              format("tensor '{}': {} {} written, its shape is {}", tensor.name, end, by_rows ? "rows" : "columns",
                     describe_shape(tensor.shape)));
    }
  }

  void check_places() const {
    std::map<int, std::vector<const StoredPiece*>> of_file;
    for (const StoredPiece& piece : index_.pieces) of_file[piece.rank].push_back(&piece);
    for (auto& [rank, pieces] : of_file) {
      std::sort(pieces.begin(), pieces.end(),
                [](const StoredPiece* a, const StoredPiece* b) { return a->offset < b->offset; });
      for (size_t i = 1; i < pieces.size(); ++i) {
        require(pieces[i]->offset >= pieces[i - 1]->offset + pieces[i - 1]->bytes(), *pieces[i],
                "lies where another piece does");
      }
    }
  }

  const CheckpointIndex& index_;
  const std::string& path_;
  ErrorKind kind_;
  std::map<int, const ShardFile*> files_;
};

}  // namespace

void check_index(const CheckpointIndex& index, const std::string& path, ErrorKind kind) {
  IndexChecker(index, path, kind).check();
}

}  // namespace invar
