#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace invar {

// Typed access to one JSON object of a Hugging Face config.json. A field that is null counts as absent, as it does for
// most of transformers. Whatever is wrong throws Error{kConfig} with the file and the field's full name.
class HfFile {
 public:
  // Throws if there is no such file or it holds no JSON object.
  static HfFile open(const std::string& path);

  [[noreturn]] void refuse(const std::string& what, const std::string& hint) const;

  bool has(const char* name) const;
  bool is_null(const char* name) const;  // given, as null
  bool is_object(const char* name) const;

  // Refuses with the names of all absent ones.
  void require(std::initializer_list<const char*> names) const;

  int64_t integer(const char* name, int64_t absent = 0) const;
  double number(const char* name, double absent) const;
  bool boolean(const char* name, bool absent) const;
  std::string text(const char* name, const std::string& absent) const;
  std::vector<std::string> texts(const char* name) const;  // a list of strings; empty if absent

  HfFile object(const char* name) const;   // the field must be an object
  std::vector<std::string> names() const;  // of all fields, in the order of the file

  std::string full_name(const char* name) const;  // "rope_parameters.rope_theta"
  std::string json(const char* name) const;       // the field as JSON text

 private:
  struct Node;
  explicit HfFile(std::shared_ptr<const Node> node);
  [[noreturn]] void refuse_type(const char* name, const char* type) const;

  std::shared_ptr<const Node> node_;
};

}  // namespace invar
