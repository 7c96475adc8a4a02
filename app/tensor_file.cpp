#include "app/tensor_file.h"

#include <algorithm>
#include <map>

#include "checkpoint/hdf5_file.h"
#include "checkpoint/hf_weights.h"
#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "core/integer.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar::app {
namespace {

void check_elements(const std::filesystem::path& path, const std::string& name, std::span<const int64_t> shape) {
  if (checked_product(shape)) return;
  throw Error(ErrorKind::kData,
              format("{}: {} has the shape {}, more elements than a file can hold", path.string(), shown(name),
                     describe_shape(shape)),
              "the file is damaged");
}

class DumpFile : public TensorFile {
 public:
  explicit DumpFile(const std::filesystem::path& path) : path_(path), reader_(path) {}

  TensorFileKind kind() const override { return TensorFileKind::kDump; }
  std::vector<std::string> names() const override { return reader_.names(); }
  Info info(const std::string& name) const override {
    const Hdf5Info info = reader_.info(name);
    check_elements(path_, name, info.shape);
    return {std::string(name_of(info.dtype)), info.dtype == DType::kI32 || info.dtype == DType::kI64, info.shape};
  }
  void read_rows(const std::string& name, Range rows, std::span<double> out) const override {
    reader_.read_rows<double>(name, rows, out);
  }

 private:
  std::filesystem::path path_;
  Hdf5Reader reader_;
};

class SafetensorsFile : public TensorFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path) : weights_(path) {
    const bool has_steps = reader_.contains("tokens") && reader_.contains("traj_loss");
    const std::vector<int64_t> shape = has_steps ? reader_.info("tokens").shape : std::vector<int64_t>();
    is_case_ = shape.size() == 3 && shape[0] > 0 && shape[2] > 0;
    for (const std::string& name : reader_.names()) {
      if (!weights_.modality_of(name).empty()) continue;
      const auto [first, is_new] = in_file_.emplace(text_model_name(name), name);
      if (is_new) continue;
      throw Error(ErrorKind::kData,
                  format("{}: {} and {} are the same tensor of the text model", path.string(), shown(first->second),
                         shown(name)),
                  "keep one of the two");
    }
  }

  TensorFileKind kind() const override { return TensorFileKind::kSafetensors; }

  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, there] : in_file_) names.push_back(name);
    if (is_case_ && !in_file_.contains("labels")) names.push_back("labels");
    return names;
  }

  std::string describe_left_out() const override { return weights_.describe_left_out(); }

  Info info(const std::string& name) const override {
    const SafetensorsInfo& info = reader_.info(is_ids(name) ? "tokens" : in_file_.at(name));
    if (is_ids(name)) return {info.dtype, true, {info.shape[1], info.shape[2] - 1}};
    check_elements(info.file, name, info.shape);
    return {info.dtype, info.dtype == "I64" || info.dtype == "I32", info.shape};
  }

  void read_rows(const std::string& name, Range rows, std::span<double> out) const override {
    const Info shape = info(name);
    if (is_ids(name)) {
      const std::vector<int64_t> ids = reader_.read_i64("tokens");
      const int64_t first = name == "labels" ? 1 : 0;
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const auto from = ids.begin() + row * (shape.cols() + 1) + first;
        std::copy_n(from, shape.cols(), out.begin() + (row - rows.begin) * shape.cols());
      }
    } else if (shape.is_integer) {
      const std::vector<int64_t> values = reader_.read_i64(in_file_.at(name));
      std::copy_n(values.begin() + rows.begin * shape.cols(), out.size(), out.begin());
    } else {
      read_floats(name, shape, rows, out);
    }
  }

 private:
  bool is_ids(const std::string& name) const { return is_case_ && (name == "tokens" || name == "labels"); }

  // The reader's matrix is dim 0 × the rest.
  void read_floats(const std::string& name, const Info& shape, Range rows, std::span<double> out) const {
    const int64_t cols = shape.cols();
    const int64_t inner = shape.shape.size() < 2 ? 1 : shape.rows() / std::max<int64_t>(1, shape.shape[0]);
    std::vector<float> values(out.size());
    const std::span<float> all(values);
    for (int64_t row = rows.begin; row < rows.end;) {
      const int64_t at = row % inner;
      const bool whole = at == 0 && rows.end - row >= inner;
      const int64_t outer = whole ? (rows.end - row) / inner : 1;
      const int64_t count = whole ? outer * inner : std::min(rows.end - row, inner - at);
      const Range columns = whole ? Range{0, inner * cols} : Range{at * cols, (at + count) * cols};
      reader_.read_rows(in_file_.at(name), {row / inner, row / inner + outer}, columns,
                        all.subspan(static_cast<size_t>((row - rows.begin) * cols), static_cast<size_t>(count * cols)));
      row += count;
    }
    std::copy(values.begin(), values.end(), out.begin());
  }

  HfWeights weights_;
  const SafetensorsReader& reader_ = weights_.files();
  std::map<std::string, std::string> in_file_;  // by the text model's name
  bool is_case_ = false;
};

}  // namespace

int64_t TensorFile::Info::rows() const {
  int64_t rows = shape.empty() ? 1 : shape[0];
  for (size_t d = 1; d + 1 < shape.size(); ++d) rows *= shape[d];
  return rows;
}

int64_t TensorFile::Info::cols() const {
  return shape.size() < 2 ? 1 : shape.back();
}

std::unique_ptr<TensorFile> open_dump(const std::filesystem::path& path) {
  return std::make_unique<DumpFile>(path);
}

std::unique_ptr<TensorFile> open_safetensors(const std::filesystem::path& path) {
  return std::make_unique<SafetensorsFile>(path);
}

}  // namespace invar::app
