#include <algorithm>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "core/integer.h"
#include "core/json_object.h"
#include "core/presence.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kPieceElements = int64_t{1} << 20;  // that are converted at once
constexpr const char* kDownloadWhole = "download or copy the model folder whole";
constexpr const char* kKeepOne = "keep one of the two: remove model.safetensors, or the index and its shards";

[[noreturn]] void refuse(const fs::path& file, const std::string& what, const std::string& hint = "",
                         std::source_location where = std::source_location::current()) {
  throw Error(ErrorKind::kData, format("{}: {}", file.string(), what), hint, where);
}

[[noreturn]] void refuse_tensor(const fs::path& file, const std::string& name, const std::string& what,
                                const std::string& hint = "",
                                std::source_location where = std::source_location::current()) {
  refuse(file, format("tensor '{}': {}", shown(name), what), hint, where);
}

// The shard of each tensor, as the index has it.
std::map<std::string, std::string> read_index(const fs::path& index_file) {
  const JsonRules rules{.fix = kDownloadWhole, .max_bytes = kLongJson, .missing = kDownloadWhole};
  const JsonObject index = JsonObject::open(index_file.string(), rules);
  index.require({"weight_map"});
  const JsonObject map = index.object("weight_map");
  std::map<std::string, std::string> shards;
  for (const std::string& name : map.names()) {
    const std::string shard = map.text(name, "");
    if (shard.empty() || fs::path(shard).filename() != shard || shard == "..") {
      refuse_tensor(index_file, name, format("its shard {} is not a plain file name", map.json(name)));
    }
    shards.emplace(name, shard);
  }
  return shards;
}

// An index whose shards are all gone is left over from them, and no second set of weights beside model.safetensors.
bool has_shards(const fs::path& folder) {
  if (!is_there(folder / safetensors::kIndexFile)) return false;
  const std::map<std::string, std::string> shards = read_index(folder / safetensors::kIndexFile);
  return std::any_of(shards.begin(), shards.end(), [&](const auto& item) {
    return item.second != safetensors::kSingleFile && is_there(folder / item.second);
  });
}

}  // namespace

int64_t SafetensorsInfo::rows() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  return shape.empty() ? 1 : shape[0];
}

int64_t SafetensorsInfo::cols() const {
  if (rows() == 0) return 0;
  return shape.empty() ? 1 : checked_product(std::span(shape).subspan(1)).value();
}

SafetensorsReader::SafetensorsReader(const fs::path& path) : path_(path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    entries_ = open_file(path);
  } else if (is_there(path / safetensors::kSingleFile)) {
    path_ = path / safetensors::kSingleFile;
    entries_ = open_file(path_);
    if (has_shards(path)) add_copies(open_shards(path / safetensors::kIndexFile));
  } else if (is_there(path / safetensors::kIndexFile)) {
    path_ = path / safetensors::kIndexFile;
    entries_ = open_shards(path_);
  } else {
    refuse(path, format("holds neither {} nor {}", safetensors::kSingleFile, safetensors::kIndexFile),
           "give a Hugging Face model folder with safetensors weights");
  }
}

SafetensorsReader::Entries SafetensorsReader::open_file(const fs::path& path) {
  const auto file = std::make_shared<const InputFile>(path.string());
  Entries result;
  for (auto& [name, entry] : safetensors::read_header(*file)) {
    result.emplace(name, Entry{std::move(entry.info), {file, entry.bytes.begin}, {}});
  }
  return result;
}

SafetensorsReader::Entries SafetensorsReader::open_shards(const fs::path& index_file) {
  std::map<std::string, Entries> shards;
  Entries result;
  for (const auto& [name, shard] : read_index(index_file)) {
    if (!shards.contains(shard)) {
      const fs::path file = index_file.parent_path() / shard;
      if (!is_there(file, kDownloadWhole)) {
        refuse(index_file, format("shard '{}', which holds tensor '{}', is missing", shown(shard), shown(name)),
               kDownloadWhole);
      }
      shards.emplace(shard, open_file(file));
    }
    const auto found = shards[shard].find(name);
    if (found == shards[shard].end()) {
      refuse_tensor(index_file, name, format("should be in shard '{}' but is not", shown(shard)), kDownloadWhole);
    }
    result.emplace(name, found->second);
  }
  return result;
}

void SafetensorsReader::add_copies(const Entries& shards) {
  const auto differ = [&](const std::string& name, const std::string& how) {
    refuse(path_.parent_path(),
           format("{} and the shards of {} are two sets of weights: tensor '{}' {}", safetensors::kSingleFile,
                  safetensors::kIndexFile, shown(name), how),
           kKeepOne);
  };
  for (const auto& [name, entry] : shards) {
    if (!entries_.contains(name)) differ(name, "is only in " + fs::path(entry.info.file).filename().string());
  }
  for (auto& [name, entry] : entries_) {
    const auto found = shards.find(name);
    if (found == shards.end()) differ(name, format("is only in {}", safetensors::kSingleFile));
    const SafetensorsInfo& other = found->second.info;
    const auto form = [](const SafetensorsInfo& info) {
      return format("{} {}", info.dtype, shown(describe_shape(info.shape)));
    };
    if (entry.info.dtype != other.dtype || entry.info.shape != other.shape) {
      differ(name, format("is {} in one and {} in the other", form(entry.info), form(other)));
    }
    entry.copy = found->second.place;
  }
}

const SafetensorsReader::Entry& SafetensorsReader::find(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) refuse_tensor(path_, name, format("not among its {} tensors", entries_.size()));
  return found->second;
}

std::vector<std::string> SafetensorsReader::names() const {
  std::vector<std::string> result;
  for (const auto& [name, entry] : entries_) result.push_back(name);
  return result;
}

const SafetensorsInfo& SafetensorsReader::info(const std::string& name) const {
  return find(name).info;
}

void SafetensorsReader::read_bytes(const std::string& name, const Entry& entry, int64_t first,
                                   std::span<std::byte> out) {
  entry.place.file->read_at(entry.place.offset + first, out);
  if (!entry.copy.file) return;
  std::vector<std::byte> copy(out.size());
  entry.copy.file->read_at(entry.copy.offset + first, std::span(copy));
  if (std::equal(out.begin(), out.end(), copy.begin())) return;
  refuse_tensor(entry.place.file->path(), name, format("has other values in {}", entry.copy.file->path()), kKeepOne);
}

void SafetensorsReader::read_rows(const std::string& name, Range rows, Range cols, std::span<float> out) const {
  const Entry& entry = find(name);
  const SafetensorsInfo& info = entry.info;
  if (!safetensors::is_floating(info.dtype)) {
    refuse_tensor(info.file, name, format("is {}; F32, BF16, F16 or F64 is needed", info.dtype));
  }
  const auto inside = [](Range range, int64_t size) {
    return 0 <= range.begin && range.begin <= range.end && range.end <= size;
  };
  if (!inside(rows, info.rows()) || !inside(cols, info.cols())) {
    refuse_tensor(info.file, name,
                  format("rows [{}, {}) × columns [{}, {}) are not all in its shape {}", rows.begin, rows.end,
                         cols.begin, cols.end, shown(describe_shape(info.shape))));
  }
  INVAR_CHECK(static_cast<int64_t>(out.size()) == rows.size() * cols.size(), "'{}': {} elements into a span of {}",
              name, rows.size() * cols.size(), out.size());
  if (out.empty()) return;

  const int64_t element = safetensors::dtype_bytes(info.dtype);
  const bool whole_rows = cols.size() == info.cols();
  const int64_t runs = whole_rows ? 1 : rows.size();
  const int64_t run_size = whole_rows ? rows.size() * cols.size() : cols.size();
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(run_size, kPieceElements) * element));
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t first = (rows.begin + run) * info.cols() + cols.begin;
    for (int64_t done = 0; done < run_size; done += kPieceElements) {
      const auto count = static_cast<size_t>(std::min(kPieceElements, run_size - done));
      const auto piece = std::span(bytes).first(count * static_cast<size_t>(element));
      read_bytes(name, entry, (first + done) * element, piece);
      safetensors::convert_floats(info.dtype, piece, out.subspan(static_cast<size_t>(run * run_size + done), count));
    }
  }
}

std::vector<int64_t> SafetensorsReader::read_i64(const std::string& name) const {
  const Entry& entry = find(name);
  const SafetensorsInfo& info = entry.info;
  const bool wide = info.dtype == "I64";
  if (!wide && info.dtype != "I32") refuse_tensor(info.file, name, format("is {}; I64 or I32 is needed", info.dtype));
  const auto elements = static_cast<size_t>(info.rows() * info.cols());
  std::vector<int64_t> result(elements);
  if (wide) {
    read_bytes(name, entry, 0, std::as_writable_bytes(std::span(result)));
    return result;
  }
  std::vector<int32_t> narrow(elements);
  read_bytes(name, entry, 0, std::as_writable_bytes(std::span(narrow)));
  std::copy(narrow.begin(), narrow.end(), result.begin());
  return result;
}

}  // namespace invar
