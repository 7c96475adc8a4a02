#include "config/field.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "config/suggest.h"
#include "core/error.h"
#include "core/format.h"
#include "core/shown.h"

namespace invar {
namespace {

bool is_digit(char c) {
  return '0' <= c && c <= '9';
}

std::string without_sign(std::string_view text) {
  if (!text.empty() && (text.front() == '+' || text.front() == '-')) text.remove_prefix(1);
  return std::string(text);
}

// YAML number text to double: 3e-4, 1e6, .5 and 1. are numbers; hexadecimal, nan and inf are not.
std::optional<double> parse_number(std::string_view text) {
  if (text.starts_with("+-")) return std::nullopt;
  if (text.starts_with('+')) text.remove_prefix(1);
  if (!std::any_of(text.begin(), text.end(), is_digit)) return std::nullopt;  // nan, inf
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size()) return std::nullopt;
  if (error == std::errc::result_out_of_range) return std::numeric_limits<double>::infinity();
  return value;
}

bool is_plain_integer(std::string_view text) {
  const std::string digits = without_sign(text);
  return !digits.empty() && std::all_of(digits.begin(), digits.end(), is_digit);
}

std::string integer_fix(const std::string& text) {
  const std::optional<double> value = parse_number(text);
  if (value && std::abs(*value) < 9e15 && *value == std::trunc(*value)) {
    return format("write {}", static_cast<int64_t>(*value));
  }
  if (text.find('_') != std::string::npos) {
    std::string plain = text;
    std::erase(plain, '_');
    if (is_plain_integer(plain)) return format("write {}", shown(plain));
  }
  return "write a whole number in full, such as 1000";
}

template <typename Int>
std::optional<Refusal> assign_integer(Int& member, const std::string& text) {
  if (!is_plain_integer(text)) return Refusal{format("must be an integer, not {}", shown(text)), integer_fix(text)};
  const std::string digits = without_sign(text);
  if (digits.size() > 1 && digits.front() == '0') {
    return Refusal{format("is written with a leading zero: {}", shown(text)),
                   "write it without: some programs read it as octal"};
  }
  std::string_view body = text;
  if (body.front() == '+') body.remove_prefix(1);
  Int value{};
  const auto [end, error] = std::from_chars(body.data(), body.data() + body.size(), value);
  if (error != std::errc() || end != body.data() + body.size()) {
    return Refusal{format("is out of range: {}", shown(text)),
                   format("use {} to {}", std::numeric_limits<Int>::min(), std::numeric_limits<Int>::max())};
  }
  member = value;
  return std::nullopt;
}

std::optional<Refusal> assign_double(double& member, const std::string& text) {
  const std::optional<double> value = parse_number(text);
  if (!value)
    return Refusal{format("must be a finite number, not {}", shown(text)), "write a number such as 0.0003 or 3e-4"};
  if (!std::isfinite(*value))
    return Refusal{format("is out of range: {}", shown(text)), "use a number that a double can hold"};
  member = *value;
  return std::nullopt;
}

std::optional<Refusal> assign_bool(bool& member, const std::string& text) {
  if (text == "true" || text == "false") {
    member = text == "true";
    return std::nullopt;
  }
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  std::string fix = "write true or false";
  if (lower == "true" || lower == "yes" || lower == "on" || lower == "y" || lower == "1") fix = "write true";
  if (lower == "false" || lower == "no" || lower == "off" || lower == "n" || lower == "0") fix = "write false";
  return Refusal{format("must be true or false, not {}", shown(text)), fix};
}

template <typename E>
std::optional<Refusal> assign_enum(E& member, const std::string& text) {
  const std::span<const std::string_view> names = Words<E>::kNames;
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) {
    member = static_cast<E>(found - names.begin());
    return std::nullopt;
  }
  const std::string_view nearest = nearest_word(text, names);
  return Refusal{format("must be {}, not {}", join_words(names), shown(text)),
                 nearest.empty() ? format("use {}", join_words(names)) : format("did you mean {}?", nearest)};
}

template <typename T>
std::optional<Refusal> assign_text(T& member, const std::string& text) {
  if constexpr (std::is_same_v<T, bool>) {
    return assign_bool(member, text);
  } else if constexpr (std::is_same_v<T, double>) {
    return assign_double(member, text);
  } else if constexpr (std::is_same_v<T, std::string>) {
    member = text;
    return std::nullopt;
  } else if constexpr (std::is_enum_v<T>) {
    return assign_enum(member, text);
  } else {
    return assign_integer(member, text);
  }
}

template <typename T>
constexpr Shape kShapeOf = Shape::kScalar;
template <typename T>
constexpr Shape kShapeOf<std::vector<T>> = Shape::kList;
template <>
constexpr Shape kShapeOf<IntegerLists> = Shape::kMapOfLists;

template <>
constexpr Shape kShapeOf<Blend> = Shape::kSources;

template <typename T>
std::optional<Refusal> assign_value(T& member, const Value& value);

// An item of a list of sources is a path, a weight before one, or a pair of both, of which the second is a path.
std::vector<BlendItem> items_of(const Value& list) {
  std::vector<BlendItem> items;
  for (const Value& value : list.items) {
    if (value.items.empty()) {
      items.push_back({value.text, !value.quoted});
      continue;
    }
    const bool is_pair = value.items.size() == 2;
    const std::array<BlendItem, 2> pair = {BlendItem{value.items.front().text},
                                           BlendItem{value.items.back().text, false}};
    if (!is_pair || parse_blend(pair).weights.empty()) {
      throw Error(ErrorKind::kConfig, "an item is neither a path nor a pair of weight and path",
                  "write blend: [[0.7, data/a], [0.3, data/b]], or [data/a, data/b]");
    }
    items.insert(items.end(), pair.begin(), pair.end());
  }
  return items;
}

std::optional<Refusal> assign_value(Blend& member, const Value& value) {
  const bool is_list = !value.items.empty();
  try {
    const bool is_none = !is_list && value.text.empty();
    member = is_none ? Blend{} : is_list ? parse_blend(items_of(value)) : parse_blend(value.text);
    return std::nullopt;
  } catch (const Error& error) {
    return Refusal{format("= {}: {}", is_list ? "[...]" : format("\"{}\"", shown(value.text)), error.what()),
                   error.hint()};
  }
}

template <typename T>
std::optional<Refusal> assign_value(std::vector<T>& member, const Value& value) {
  std::vector<T> items;
  for (const Value& item : value.items) {
    T parsed{};
    if (std::optional<Refusal> refusal = assign_value(parsed, item)) {
      refusal->rule = format("has an item that {}", refusal->rule);
      return refusal;
    }
    items.push_back(std::move(parsed));
  }
  member = std::move(items);
  return std::nullopt;
}

std::optional<Refusal> assign_value(IntegerLists& member, const Value& value) {
  IntegerLists lists;
  for (const Value& entry : value.items) {
    if (lists.contains(entry.text)) return Refusal{format("names {} twice", shown(entry.text)), "keep one of the two"};
    if (std::optional<Refusal> refusal = assign_value(lists[entry.text], entry)) return refusal;
  }
  member = std::move(lists);
  return std::nullopt;
}

template <typename T>
std::optional<Refusal> assign_value(T& member, const Value& value) {
  // Words may stand in quotes, but a quoted number or truth value is text in YAML.
  if constexpr (!std::is_same_v<T, std::string> && !std::is_enum_v<T>) {
    if (value.quoted) {
      T parsed{};
      const std::optional<Refusal> refusal = assign_text(parsed, value.text);
      return Refusal{format("is a quoted string: \"{}\"", shown(value.text)),
                     refusal ? refusal->fix : format("write {}", shown(value.text))};
    }
  }
  return assign_text(member, value.text);
}

// Plain where no YAML reader could take it for anything but this text, else in double quotes.
std::string print_string(const std::string& text) {
  const auto is_plain = [](char c) {
    return is_digit(c) || ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_' || c == '/' || c == '.' ||
           c == '-';
  };
  const bool is_null_word = text == "null" || text == "Null" || text == "NULL";
  if (!text.empty() && std::all_of(text.begin(), text.end(), is_plain) && text.front() != '-' && text.front() != '.' &&
      !parse_number(text) && !is_null_word) {
    return text;
  }
  std::string quoted = "\"";
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

// As text where that can be read back, else as a list.
std::string print_blend(const Blend& blend) {
  const std::string text = text_of(blend);
  if (blend.empty() || !text.empty()) return print_string(text);
  std::string items;
  for (size_t i = 0; i < blend.paths.size(); ++i) {
    if (!items.empty()) items += ", ";
    const std::string path = print_string(blend.paths[i]);
    items += blend.weights.empty() ? path : format("[{}, {}]", blend.weights[i], path);
  }
  return '[' + items + ']';
}

template <typename T>
std::string print_value(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return print_string(value);
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(word_of(value));
  } else if constexpr (kShapeOf<T> == Shape::kSources) {
    return print_blend(value);
  } else if constexpr (kShapeOf<T> == Shape::kScalar) {
    return format("{}", value);
  } else {
    std::string items;
    for (const auto& item : value) {
      if (!items.empty()) items += ", ";
      if constexpr (kShapeOf<T> == Shape::kList) {
        items += print_value(item);
      } else {
        items += format("{}: {}", print_string(item.first), print_value(item.second));
      }
    }
    return kShapeOf<T> == Shape::kList ? '[' + items + ']' : '{' + items + '}';
  }
}

template <typename T>
std::string type_of() {
  if constexpr (std::is_same_v<T, bool>) {
    return "true | false";
  } else if constexpr (std::is_same_v<T, double>) {
    return "number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "text";
  } else if constexpr (std::is_enum_v<T>) {
    std::string names;
    for (std::string_view name : Words<T>::kNames) names += (names.empty() ? "" : " | ") + std::string(name);
    return names;
  } else if constexpr (kShapeOf<T> == Shape::kSources) {
    return "text or list";
  } else if constexpr (kShapeOf<T> == Shape::kList) {
    return format("list of {}s", type_of<typename T::value_type>());
  } else if constexpr (kShapeOf<T> == Shape::kMapOfLists) {
    return "map to lists of integers";
  } else {
    return "integer";
  }
}

}  // namespace

Shape shape_of(const Field& field) {
  return std::visit([](const auto* member) { return kShapeOf<std::remove_cvref_t<decltype(*member)>>; }, field);
}

std::optional<Refusal> assign(const Field& field, const Value& value) {
  return std::visit([&](auto* member) { return assign_value(*member, value); }, field);
}

std::string print(const Field& field) {
  return std::visit([](const auto* member) { return print_value(*member); }, field);
}

std::string type_name(const Field& field) {
  return std::visit([](const auto* member) { return type_of<std::remove_cvref_t<decltype(*member)>>(); }, field);
}

}  // namespace invar
