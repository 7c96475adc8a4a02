#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace invar {

// A value of a YAML text.
struct YamlNode {
  enum class Kind : uint8_t { kNull, kScalar, kList, kMap };

  Kind kind = Kind::kNull;
  int line = 1;                      // of its first character, from 1 on
  std::string text = {};             // of a scalar
  std::string tag = {};              // of a scalar: "?" plain, "!" in quotes, else the tag that it carries
  std::vector<YamlNode> items = {};  // of a list; of a map its keys and values in turn

  bool is_null() const { return kind == Kind::kNull; }
  bool is_scalar() const { return kind == Kind::kScalar; }
  bool is_list() const { return kind == Kind::kList; }
  bool is_map() const { return kind == Kind::kMap; }
};

// Why a text is no YAML document of ours.
struct YamlFault {
  int line = 0;  // from 1 on; 0 for the text as a whole
  std::string rule;
  std::string fix;  // empty where the caller knows better
};

// Far above any config, and small enough to read at once.
inline constexpr size_t kLargestYaml = size_t{4} << 20;

// The one document of the text; null for an empty one. It is judged by the parser's events, so nothing is built of what
// is refused. Throws YamlFault for text that is not well formed, too large, too deep or of too many values (those that
// an alias repeats count each time), and for a second document.
YamlNode parse_yaml(const std::string& text);

}  // namespace invar
