#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"

namespace invar {

// How a JSON text of somebody else is refused.
struct JsonRules {
  ErrorKind kind = ErrorKind::kData;
  std::string fix = {};         // the hint where the form of the text or the type of a field is wrong
  int64_t max_bytes = 1 << 20;  // of a file
  std::string missing = {};     // the hint where a required field is absent
};

// For files that list all tokens or all tensors.
inline constexpr int64_t kLongJson = 100'000'000;

// Typed access to one object of a JSON text that others wrote. A field that is null counts as absent, as it does for
// most of transformers.
//
// Whatever is wrong throws Error{kind} with the file and the field's full name. Of a text that is bad syntax, a key
// given twice, and a number that no double holds. It may have 64 levels and four million values, which bounds the
// memory that a few bytes each can take. In the calls below a field of another type is wrong.
class JsonObject {
 public:
  // The file must be a regular one that holds an object. Messages about its form name the line.
  static JsonObject open(const std::string& path, const JsonRules& rules);
  // A text out of a file, such as one line or a header: `where` stands before each message.
  static JsonObject parse(const std::string& text, const std::string& where, const JsonRules& rules);

  [[noreturn]] void refuse(const std::string& what, const std::string& hint) const;

  bool has(const std::string& name) const;
  bool is_null(const std::string& name) const;  // given, as null
  bool is_object(const std::string& name) const;
  bool is_list(const std::string& name) const;
  bool is_number(const std::string& name) const;
  bool is_text(const std::string& name) const;

  // Refuses with the names of all absent ones.
  void require(std::initializer_list<const char*> names) const;

  int64_t integer(const std::string& name, int64_t absent = 0) const;
  double number(const std::string& name, double absent) const;
  bool boolean(const std::string& name, bool absent) const;
  std::string text(const std::string& name, const std::string& absent) const;
  // Lists whose items all have that type; empty if absent.
  std::vector<int64_t> integers(const std::string& name) const;
  std::vector<std::string> texts(const std::string& name) const;
  std::vector<JsonObject> objects(const std::string& name) const;

  JsonObject object(const std::string& name) const;  // the field must be an object
  std::vector<std::string> names() const;            // of all fields, in the order of the text

  // For messages, shortened and escaped:
  std::string full_name(const std::string& name) const;  // "rope_parameters.rope_theta"
  std::string json(const std::string& name) const;       // the field as JSON text

 private:
  struct Document;
  struct Node;
  explicit JsonObject(std::shared_ptr<const Node> node);
  static JsonObject read(const std::string& text, const std::string& where, const JsonRules& rules, bool count_lines);
  [[noreturn]] void refuse_type(const std::string& name, const char* type) const;

  std::shared_ptr<const Node> node_;
};

}  // namespace invar
