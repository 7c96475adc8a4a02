#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "core/error.h"
#include "core/integer.h"
#include "core/pending_file.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

const char* format_name(const SafetensorsSpec& tensor) {
  INVAR_CHECK(tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16, "'{}' is {}: f32 or bf16 can be written",
              tensor.name, name_of(tensor.dtype));
  return tensor.dtype == DType::kF32 ? "F32" : "BF16";
}

// Larger elements first: as the header is padded to 8 bytes, each tensor is then aligned for readers that map the file.
std::vector<SafetensorsSpec> in_file_order(std::vector<SafetensorsSpec> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return size_of(a.dtype) > size_of(b.dtype); });
  return tensors;
}

// Length and JSON, padded with spaces to a multiple of 8 bytes.
std::string make_header(const std::vector<SafetensorsSpec>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(safetensors::kMetadataKey)] = metadata;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    nlohmann::ordered_json& entry = header[tensor.name];
    entry["dtype"] = format_name(tensor);
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + tensor.bytes()};
    offset += tensor.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  std::string result(sizeof length, '\0');
  std::memcpy(result.data(), &length, sizeof length);
  return result + text;
}

}  // namespace

int64_t SafetensorsSpec::bytes() const {
  INVAR_CHECK(std::all_of(shape.begin(), shape.end(), [](int64_t dim) { return dim >= 0; }), "'{}' has a negative dim",
              name);
  const auto numel = checked_product(shape);
  INVAR_CHECK(numel && *numel <= INT64_MAX / size_of(dtype), "'{}' is too large", name);
  return *numel * size_of(dtype);
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, const std::vector<SafetensorsSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path) {
  const auto ordered = in_file_order(tensors);
  const std::string header = make_header(ordered, metadata);
  auto offset = static_cast<int64_t>(header.size());
  for (const auto& tensor : ordered) {
    const SafetensorsInfo view{"", tensor.shape, ""};
    const bool is_new = slots_.emplace(tensor.name, Slot{tensor.dtype, offset, view.rows(), view.cols(), {}}).second;
    INVAR_CHECK(is_new && tensor.name != safetensors::kMetadataKey, "{}: tensor name '{}' is used twice or reserved",
                path.string(), tensor.name);
    offset += tensor.bytes();
  }
  file_ = std::make_unique<PendingFile>(path);
  file_->write_at(std::as_bytes(std::span(header)), 0);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write_rows(const std::string& name, int64_t first_row, int64_t count,
                                   std::span<const float> values) {
  const auto found = slots_.find(name);
  INVAR_CHECK(found != slots_.end(), "{}: tensor '{}' was not declared", path_.string(), name);
  Slot& slot = found->second;
  INVAR_CHECK(0 <= first_row && 0 <= count && count <= slot.rows - first_row, "'{}': rows [{}, {}) of {}", name,
              first_row, first_row + count, slot.rows);
  INVAR_CHECK(static_cast<int64_t>(values.size()) == count * slot.cols, "'{}': {} values for {} rows of {}", name,
              values.size(), count, slot.cols);
  mark_written(name, slot, {first_row, first_row + count});

  int64_t offset = slot.offset + first_row * slot.cols * size_of(slot.dtype);
  if (slot.dtype == DType::kF32) return file_->write_at(std::as_bytes(values), offset);
  constexpr size_t kChunk = size_t{1} << 18;
  std::vector<BF16> rounded(std::min(kChunk, values.size()));
  while (!values.empty()) {
    const auto chunk = values.first(std::min(kChunk, values.size()));
    std::transform(chunk.begin(), chunk.end(), rounded.begin(), [](float value) { return BF16(value); });
    const auto bytes = std::as_bytes(std::span(rounded).first(chunk.size()));
    file_->write_at(bytes, offset);
    offset += static_cast<int64_t>(bytes.size());
    values = values.subspan(chunk.size());
  }
}

// Adds a run of rows to those written before, which it must not meet.
void SafetensorsWriter::mark_written(const std::string& name, Slot& slot, Range rows) {
  if (rows.empty()) return;
  auto& written = slot.written;
  auto next = written.lower_bound(rows.begin);
  const bool meets_next = next != written.end() && next->first < rows.end;
  const auto previous = next == written.begin() ? written.end() : std::prev(next);
  const bool meets_previous = previous != written.end() && previous->second > rows.begin;
  INVAR_CHECK(!meets_next && !meets_previous, "'{}': rows [{}, {}) meet rows that were written before", name,
              rows.begin, rows.end);
  if (next != written.end() && next->first == rows.end) {
    rows.end = next->second;
    written.erase(next);
  }
  if (previous != written.end() && previous->second == rows.begin) {
    previous->second = rows.end;
  } else {
    written.emplace(rows.begin, rows.end);
  }
}

void SafetensorsWriter::finish() {
  for (const auto& [name, slot] : slots_) {
    if (slot.rows == 0 || slot.cols == 0) continue;
    const auto first = slot.written.begin();
    const bool from_top = first != slot.written.end() && first->first == 0;
    const int64_t missing = from_top ? first->second : 0;
    INVAR_CHECK(missing == slot.rows, "{}: tensor '{}' is incomplete: row {} of {} was never written", path_.string(),
                name, missing, slot.rows);
  }
  file_->publish();
}

}  // namespace invar
