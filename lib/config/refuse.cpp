#include "config/refuse.h"

#include "config/key_table.h"
#include "core/shown.h"

namespace invar {
namespace {

void check(const Config& config, std::string_view key, double value, UsedAs type, bool (*holds)(double),
           const std::string& rule) {
  const std::string hint = format("set {} {}", key, rule);
  if (!holds(value)) refuse(config, {key}, format("{} = {} must be {}", key, value, rule), hint);
  const bool is_f32 = type == UsedAs::kF32;
  const double largest =
      is_f32 ? static_cast<double>(std::numeric_limits<float>::max()) : std::numeric_limits<double>::max();
  if (value > largest) {
    refuse(config, {key},
           format("{} = {} exceeds {}, the largest number of {}", key, value, largest, is_f32 ? "fp32" : "fp64"), hint);
  }
  if (!is_f32) return;
  const auto rounded = static_cast<double>(static_cast<float>(value));
  if (holds(rounded)) return;
  refuse(config, {key},
         format("{} = {} is computed with in fp32, where it becomes {}; it must be {}", key, value, rounded, rule),
         hint);
}

const Key& key_of(std::string_view name) {
  const Key* key = find_key(name);
  INVAR_CHECK(key != nullptr, "no config key {}", name);
  return *key;
}

}  // namespace

void refuse(const Config& config, std::initializer_list<std::string_view> keys, const std::string& message,
            const std::string& hint) {
  std::string place;
  const auto look_at = [&](std::string_view name) {
    const auto origin = config.origin.find(std::string(name));
    if (place.empty() && origin != config.origin.end()) place = origin->second + ": ";
  };
  for (const std::string_view key : keys) look_at(key);
  for (const std::string_view key : keys) look_at(key.substr(0, key.find('.')));
  look_at("");
  constexpr size_t kLongest = 2000;  // values in it may be of any length
  throw Error(ErrorKind::kConfig, shown(place + message, kLongest), shown(hint, kLongest));
}

void refuse_if_set(const Config& config, std::string_view key, const std::string& where) {
  if (has_default(key_of(key), config)) return;
  refuse(config, {key}, format("{} = {} would be ignored {}", key, print(key_of(key), config), where),
         format("remove {}", key));
}

void check_required(const Config& config, std::string_view key) {
  if (!has_default(key_of(key), config)) return;
  const bool is_given = config.origin.contains(std::string(key));
  const std::string given = is_given ? format("{} = {} means that it is not set", key, print(key_of(key), config)) : "";
  refuse(config, {key}, is_given ? given : format("{} is not set", key), format("set {}", key));
}

void check_count(const Config& config, std::string_view key, int64_t value, int64_t at_least, int64_t at_most) {
  if (at_least <= value && value <= at_most) return;
  refuse(
      config, {key}, format("{} = {} must be {} to {}", key, value, at_least, at_most),
      value < at_least ? format("set {} to at least {}", key, at_least) : format("set {} to at most {}", key, at_most));
}

void check_positive(const Config& config, std::string_view key, double value, UsedAs type) {
  check(
      config, key, value, type, [](double x) { return x > 0; }, "above 0");
}

void check_not_negative(const Config& config, std::string_view key, double value, UsedAs type) {
  check(
      config, key, value, type, [](double x) { return x >= 0; }, "0 or more");
}

void check_fraction(const Config& config, std::string_view key, double value, UsedAs type) {
  check(
      config, key, value, type, [](double x) { return x >= 0 && x < 1; }, "from 0 to below 1");
}

}  // namespace invar
