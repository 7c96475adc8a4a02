#include "checkpoint/safetensors_format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/integer.h"
#include "core/json_object.h"
#include "core/shown.h"
#include "core/tensor.h"

namespace invar::safetensors {

int64_t dtype_bytes(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, int64_t>, 15> kBytes{{{"F64", 8},
                                                                                {"F32", 4},
                                                                                {"F16", 2},
                                                                                {"BF16", 2},
                                                                                {"F8_E4M3", 1},
                                                                                {"F8_E5M2", 1},
                                                                                {"I64", 8},
                                                                                {"I32", 4},
                                                                                {"I16", 2},
                                                                                {"I8", 1},
                                                                                {"U64", 8},
                                                                                {"U32", 4},
                                                                                {"U16", 2},
                                                                                {"U8", 1},
                                                                                {"BOOL", 1}}};
  for (const auto& [name, bytes] : kBytes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

bool is_floating(std::string_view dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64";
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2⁻²⁴
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 0x1fu ? 0xffu : exponent + (127 - 15);  // infinity and NaN keep their place
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

namespace {

template <class T, class Convert>
void convert_run(std::span<const std::byte> from, std::span<float> out, Convert convert) {
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, from.data() + i * sizeof(T), sizeof(T));
    out[i] = convert(value);
  }
}

}  // namespace

void convert_floats(std::string_view dtype, std::span<const std::byte> from, std::span<float> out) {
  if (out.empty()) return;
  if (dtype == "F32") {
    std::memcpy(out.data(), from.data(), out.size_bytes());
  } else if (dtype == "BF16") {
    convert_run<BF16>(from, out, [](BF16 value) { return static_cast<float>(value); });
  } else if (dtype == "F16") {
    convert_run<uint16_t>(from, out, half_to_float);
  } else {
    convert_run<double>(from, out, [](double value) { return static_cast<float>(value); });
  }
}

namespace {

constexpr const char* kDamaged = "the file is damaged, was not copied whole, or is not a safetensors file";

[[noreturn]] void refuse(const InputFile& file, const std::string& what,
                         std::source_location where = std::source_location::current()) {
  throw Error(ErrorKind::kData, format("{}: {}", file.path(), what), kDamaged, where);
}

[[noreturn]] void refuse_tensor(const InputFile& file, const std::string& name, const std::string& what,
                                std::source_location where = std::source_location::current()) {
  refuse(file, format("tensor '{}': {}", shown(name), what), where);
}

// `data` is where in the file all tensors lie.
HeaderEntry read_entry(const InputFile& file, const std::string& name, const JsonObject& entry, Range data) {
  entry.require({"dtype", "shape", "data_offsets"});
  HeaderEntry result{{entry.text("dtype", ""), entry.integers("shape"), file.path()}, {}};
  const int64_t element = dtype_bytes(result.info.dtype);
  if (element == 0) refuse_tensor(file, name, format("unknown dtype '{}'", shown(result.info.dtype)));

  const std::vector<int64_t> offsets = entry.integers("data_offsets");
  if (offsets.size() != 2) refuse_tensor(file, name, "'data_offsets' is not a pair");
  if (offsets[0] < 0 || offsets[0] > offsets[1] || offsets[1] > data.size()) {
    refuse_tensor(file, name,
                  format("bytes [{}, {}) are out of range, the file holds {} bytes of data", offsets[0], offsets[1],
                         data.size()));
  }
  result.bytes = {data.begin + offsets[0], data.begin + offsets[1]};
  std::vector<int64_t> dims = result.info.shape;
  if (std::any_of(dims.begin(), dims.end(), [](int64_t dim) { return dim < 0; })) {
    refuse_tensor(file, name, format("its shape {} has a negative size", entry.json("shape")));
  }
  dims.push_back(element);
  if (const auto expected = checked_product(dims); expected != result.bytes.size()) {
    refuse_tensor(file, name,
                  format("{} {} does not fill its {} bytes", result.info.dtype,
                         shown(describe_shape(result.info.shape)), result.bytes.size()));
  }
  return result;
}

// Tensors lie one after the other, from the first byte of the data to the last.
void check_no_gaps(const InputFile& file, const std::map<std::string, HeaderEntry>& entries, Range data) {
  std::vector<std::pair<Range, std::string>> order;
  for (const auto& [name, entry] : entries) order.emplace_back(entry.bytes, name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  int64_t end = data.begin;
  for (const auto& [bytes, name] : order) {
    if (bytes.begin < end) {
      refuse_tensor(file, name, format("overlaps the tensor before it, at byte {}", bytes.begin - data.begin));
    }
    if (bytes.begin > end) refuse_tensor(file, name, format("a gap of {} bytes lies before it", bytes.begin - end));
    end = bytes.end;
  }
  if (end != data.end) refuse(file, format("{} bytes follow the last tensor", data.end - end));
}

}  // namespace

std::map<std::string, HeaderEntry> read_header(const InputFile& file) {
  if (file.size() < kLengthBytes) refuse(file, format("too short: {} bytes", file.size()));
  const auto length = file.value<uint64_t>(0);
  if (length == 0 || length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file.size() - kLengthBytes))) {
    refuse(file, format("says that its header has {} bytes, in a file of {}", length, file.size()));
  }
  std::string text(static_cast<size_t>(length), '\0');
  file.read_at(kLengthBytes, std::span(text));
  const JsonObject header = JsonObject::parse(text, file.path(), {.fix = kDamaged, .missing = kDamaged});
  const Range data{kLengthBytes + static_cast<int64_t>(length), file.size()};
  std::map<std::string, HeaderEntry> entries;
  for (const std::string& name : header.names()) {
    const JsonObject entry = header.object(name);
    if (name != kMetadataKey) {
      entries.emplace(name, read_entry(file, name, entry, data));
      continue;
    }
    for (const std::string& key : entry.names()) (void)entry.text(key, "");  // refuses other types
  }
  check_no_gaps(file, entries, data);
  return entries;
}

}  // namespace invar::safetensors
