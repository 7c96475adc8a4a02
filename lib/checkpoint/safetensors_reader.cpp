#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "core/error.h"
#include "core/integer.h"
#include "core/tensor.h"

namespace invar {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

[[noreturn]] void refuse(const fs::path& file, const std::string& what, const std::string& hint = "",
                         std::source_location where = std::source_location::current()) {
  throw Error(ErrorKind::kData, format("{}: {}", file.string(), what), hint, where);
}

[[noreturn]] void refuse_tensor(const fs::path& file, const std::string& name, const std::string& what,
                                const std::string& hint = "",
                                std::source_location where = std::source_location::current()) {
  refuse(file, format("tensor '{}': {}", name, what), hint, where);
}

// Parses text; keys of objects at key_depth (1 is the outermost object) must be unique. A plain parse would silently
// keep the last of two.
json parse_unique(const fs::path& file, std::string_view text, int key_depth) {
  std::set<std::string> seen;
  const auto check_keys = [&](int depth, json::parse_event_t event, json& key) {
    if (event == json::parse_event_t::object_start && depth == key_depth - 1) seen.clear();
    if (event == json::parse_event_t::key && depth == key_depth) {
      if (!seen.insert(key.get<std::string>()).second) refuse_tensor(file, key.get<std::string>(), "named twice");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check_keys);
  } catch (const json::exception& error) {
    refuse(file, format("not valid JSON: {}", error.what()), "the file is damaged or not what its name says");
  }
}

std::vector<int64_t> get_integers(const fs::path& file, const std::string& name, const json& entry, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array()) refuse_tensor(file, name, format("has no list '{}'", key));
  std::vector<int64_t> result;
  for (const json& value : *found) {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMax) {
      refuse_tensor(file, name, format("'{}' holds {}, not a whole number", key, value.dump()));
    }
    result.push_back(value.get<int64_t>());
  }
  return result;
}

// Dtype, shape and byte range of one header entry, checked against each other and the file.
struct HeaderEntry {
  SafetensorsInfo info;
  Range bytes;  // relative to the data
};

HeaderEntry parse_entry(const fs::path& file, const std::string& name, const json& entry, int64_t data_bytes) {
  if (!entry.is_object()) refuse_tensor(file, name, "its header entry is not an object");
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) refuse_tensor(file, name, "has no 'dtype'");
  HeaderEntry result{{dtype->get<std::string>(), get_integers(file, name, entry, "shape"), file.string()}, {}};
  const int64_t element = safetensors::dtype_bytes(result.info.dtype);
  if (element == 0) refuse_tensor(file, name, format("unknown dtype '{}'", result.info.dtype));

  const auto offsets = get_integers(file, name, entry, "data_offsets");
  if (offsets.size() != 2) refuse_tensor(file, name, "'data_offsets' is not a pair");
  result.bytes = {offsets[0], offsets[1]};
  if (result.bytes.begin > result.bytes.end || result.bytes.end > data_bytes) {
    refuse_tensor(file, name,
                  format("bytes [{}, {}) are out of range, the file holds {} bytes of data", result.bytes.begin,
                         result.bytes.end, data_bytes),
                  "the file is damaged or was not copied whole");
  }
  auto dims = result.info.shape;
  dims.push_back(element);
  if (const auto expected = checked_product(dims); expected != result.bytes.size()) {
    refuse_tensor(file, name,
                  format("{} {} does not fill its {} bytes", result.info.dtype, describe_shape(result.info.shape),
                         result.bytes.size()));
  }
  return result;
}

// Tensors lie one after the other, from the first byte of the data to the last.
void check_no_gaps(const fs::path& file, const std::map<std::string, HeaderEntry>& entries, int64_t data_bytes) {
  std::vector<std::pair<Range, std::string>> order;
  for (const auto& [name, entry] : entries) order.emplace_back(entry.bytes, name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  int64_t end = 0;
  for (const auto& [bytes, name] : order) {
    if (bytes.begin < end) refuse_tensor(file, name, format("overlaps the tensor before it, at byte {}", bytes.begin));
    if (bytes.begin > end) refuse_tensor(file, name, format("a gap of {} bytes lies before it", bytes.begin - end));
    end = bytes.end;
  }
  if (end != data_bytes) refuse(file, format("{} bytes follow the last tensor", data_bytes - end));
}

template <class T>
T load(const std::byte* from) {  // the data may lie at any address
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T, class Convert>
void convert_run(const std::byte* from, std::span<float> out, Convert convert) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = convert(load<T>(from + i * sizeof(T)));
}

// out.size() elements of a floating dtype, from contiguous bytes.
void convert_floats(std::string_view dtype, const std::byte* from, std::span<float> out) {
  if (out.empty()) return;
  if (dtype == "F32") {
    std::memcpy(out.data(), from, out.size_bytes());
  } else if (dtype == "BF16") {
    convert_run<BF16>(from, out, [](BF16 value) { return static_cast<float>(value); });
  } else if (dtype == "F16") {
    convert_run<uint16_t>(from, out, safetensors::half_to_float);
  } else {
    convert_run<double>(from, out, [](double value) { return static_cast<float>(value); });
  }
}

bool is_floating(std::string_view dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64";
}

}  // namespace

int64_t SafetensorsInfo::rows() const {
  return shape.empty() ? 1 : shape[0];
}

int64_t SafetensorsInfo::cols() const {
  if (shape.empty()) return 1;
  return checked_product(std::span(shape).subspan(1)).value_or(0);  // too large only beside a dim 0 of size 0
}

SafetensorsReader::SafetensorsReader(const fs::path& path) : path_(path) {
  std::error_code ignored;  // a path that cannot be looked at is refused when it is opened
  if (!fs::is_directory(path, ignored)) {
    entries_ = open_file(path);
  } else if (fs::exists(path / safetensors::kSingleFile, ignored)) {
    entries_ = open_file(path / safetensors::kSingleFile);
  } else if (fs::exists(path / safetensors::kIndexFile, ignored)) {
    open_shards(path / safetensors::kIndexFile);
  } else {
    refuse(path, format("holds neither {} nor {}", safetensors::kSingleFile, safetensors::kIndexFile),
           "give a Hugging Face model folder with safetensors weights");
  }
}

SafetensorsReader::Entries SafetensorsReader::open_file(const fs::path& file) {
  const MappedFile& mapped = files_.emplace_back(file.string());
  const auto bytes = mapped.bytes();
  const int64_t file_bytes = mapped.size();
  const std::string hint = "the file is damaged, was not copied whole, or is not a safetensors file";
  if (file_bytes < safetensors::kLengthBytes) refuse(file, format("too short: {} bytes", file_bytes), hint);
  const auto length = mapped.value<uint64_t>(0);
  if (length == 0 || length > static_cast<uint64_t>(safetensors::kMaxHeaderBytes) ||
      length > static_cast<uint64_t>(file_bytes - safetensors::kLengthBytes)) {
    refuse(file, format("says that its header has {} bytes, in a file of {}", length, file_bytes), hint);
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data() + safetensors::kLengthBytes);
  const json header = parse_unique(file, {text, static_cast<size_t>(length)}, 1);
  if (!header.is_object()) refuse(file, "its header is not a JSON object", hint);

  const auto data = bytes.subspan(static_cast<size_t>(safetensors::kLengthBytes) + static_cast<size_t>(length));
  const auto data_bytes = static_cast<int64_t>(data.size());
  std::map<std::string, HeaderEntry> parsed;
  for (const auto& [name, entry] : header.items()) {
    if (name != safetensors::kMetadataKey) {
      parsed.emplace(name, parse_entry(file, name, entry, data_bytes));
      continue;
    }
    if (!entry.is_object()) refuse(file, "'__metadata__' is not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse(file, format("'__metadata__': '{}' is not a string", key));
    }
  }
  check_no_gaps(file, parsed, data_bytes);
  Entries result;
  for (auto& [name, entry] : parsed) {
    const auto run = data.subspan(static_cast<size_t>(entry.bytes.begin), static_cast<size_t>(entry.bytes.size()));
    result.emplace(name, Entry{std::move(entry.info), run});
  }
  return result;
}

void SafetensorsReader::open_shards(const fs::path& index_file) {
  std::ifstream stream(index_file, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  if (!stream) refuse(index_file, "cannot be read");
  const json index = parse_unique(index_file, text, 2);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    refuse(index_file, "has no 'weight_map'");
  }
  std::map<std::string, Entries> shards;
  for (const auto& [name, value] : index["weight_map"].items()) {
    if (!value.is_string()) refuse_tensor(index_file, name, "its shard is not a file name");
    const auto shard = value.get<std::string>();
    if (fs::path(shard).filename() != shard || shard == "..") {
      refuse_tensor(index_file, name, format("its shard '{}' is not a plain file name", shard));
    }
    if (!shards.contains(shard)) {
      const fs::path file = path_ / shard;
      if (std::error_code ignored; !fs::exists(file, ignored)) {
        refuse(index_file, format("shard '{}', which holds tensor '{}', is missing", shard, name),
               "download or copy the model folder whole");
      }
      shards.emplace(shard, open_file(file));
    }
    const auto found = shards[shard].find(name);
    if (found == shards[shard].end()) {
      refuse_tensor(index_file, name, format("should be in shard '{}' but is not", shard));
    }
    entries_.emplace(name, found->second);
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

void SafetensorsReader::read_rows(const std::string& name, Range rows, Range cols, std::span<float> out) const {
  const auto& [info, bytes] = find(name);
  if (!is_floating(info.dtype)) {
    refuse_tensor(info.file, name, format("is {}; F32, BF16, F16 or F64 is needed", info.dtype));
  }
  const auto inside = [](Range range, int64_t size) {
    return 0 <= range.begin && range.begin <= range.end && range.end <= size;
  };
  if (!inside(rows, info.rows()) || !inside(cols, info.cols())) {
    refuse_tensor(info.file, name,
                  format("rows [{}, {}) × columns [{}, {}) are not all in its shape {}", rows.begin, rows.end,
                         cols.begin, cols.end, describe_shape(info.shape)));
  }
  INVAR_CHECK(static_cast<int64_t>(out.size()) == rows.size() * cols.size(), "'{}': {} elements into a span of {}",
              name, rows.size() * cols.size(), out.size());
  if (out.empty()) return;

  const int64_t element = safetensors::dtype_bytes(info.dtype);
  const bool whole_rows = cols.size() == info.cols();
  const int64_t runs = whole_rows ? 1 : rows.size();
  const auto run_size = static_cast<size_t>(whole_rows ? rows.size() * cols.size() : cols.size());
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t first = (rows.begin + run) * info.cols() + cols.begin;
    convert_floats(info.dtype, bytes.data() + first * element,
                   out.subspan(static_cast<size_t>(run) * run_size, run_size));
  }
}

std::vector<int64_t> SafetensorsReader::read_i64(const std::string& name) const {
  const auto& [info, bytes] = find(name);
  const bool wide = info.dtype == "I64";
  if (!wide && info.dtype != "I32") refuse_tensor(info.file, name, format("is {}; I64 or I32 is needed", info.dtype));
  std::vector<int64_t> result(bytes.size() / (wide ? 8 : 4));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = wide ? load<int64_t>(&bytes[i * 8]) : load<int32_t>(&bytes[i * 4]);
  }
  return result;
}

}  // namespace invar
