#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/config.h"

namespace invar {

// The words of an enum in YAML, in the order of its values.
template <typename E>
struct Words;
template <>
struct Words<Precision> {
  static constexpr std::string_view kNames[] = {"fp32", "bf16"};
};
template <>
struct Words<Reduction> {
  static constexpr std::string_view kNames[] = {"fast", "invariant"};
};
template <>
struct Words<InitKind> {
  static constexpr std::string_view kNames[] = {"random", "hf"};
};
template <>
struct Words<DeviceChoice> {
  static constexpr std::string_view kNames[] = {"auto", "cpu", "cuda"};
};
template <>
struct Words<RecomputeKind> {
  static constexpr std::string_view kNames[] = {"none", "selective", "full"};
};
template <>
struct Words<ScheduleKind> {
  static constexpr std::string_view kNames[] = {"constant", "cosine", "linear", "wsd"};
};
template <>
struct Words<DataKind> {
  static constexpr std::string_view kNames[] = {"mock", "tokens", "megatron"};
};
template <>
struct Words<NonfinitePolicy> {
  static constexpr std::string_view kNames[] = {"skip", "stop"};
};
template <>
struct Words<BatchPolicy> {
  static constexpr std::string_view kNames[] = {"keep", "shrink"};
};
template <>
struct Words<SaveFailurePolicy> {
  static constexpr std::string_view kNames[] = {"continue", "stop"};
};

// The YAML word of an enum value, for messages.
template <typename E>
constexpr std::string_view word_of(E value) {
  return Words<E>::kNames[static_cast<size_t>(value)];
}

// One member of a Config.
using Field = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, Precision*, Reduction*, InitKind*,
                           DeviceChoice*, RecomputeKind*, ScheduleKind*, DataKind*, NonfinitePolicy*,
                           SaveFailurePolicy*, BatchPolicy*, std::vector<int>*, std::vector<double>*,
                           std::vector<std::string>*, IntegerLists*, Blend*>;

// kSources: a scalar, or a list of scalars and pairs.
enum class Shape : uint8_t { kScalar, kList, kMapOfLists, kSources };
Shape shape_of(const Field& field);

// A YAML value as written.
struct Value {
  std::string text;               // of a scalar; of an item of a map, its name
  bool quoted = false;            // a scalar that stood in quotes, or was a block of text
  std::vector<Value> items = {};  // of a list or a map
};

// Why a value is refused, worded to follow the key's name, and the fix.
struct Refusal {
  std::string rule;
  std::string fix;
};

// Stores a value of the field's shape in the field, or says why not; then the field is unchanged.
std::optional<Refusal> assign(const Field& field, const Value& value);

// The value as YAML in one line, which is read back to the same value.
std::string print(const Field& field);

// For the table of keys: "integer", "fp32 | bf16".
std::string type_name(const Field& field);

}  // namespace invar
