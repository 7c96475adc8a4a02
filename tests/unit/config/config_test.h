#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "config/yaml_loader.h"
#include "core/error.h"
#include "support/catch.h"

namespace invar {

// A folder of its own for each test, removed with it.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "invar_config_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string path() const { return path_.string(); }

  std::string write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
    return file.string();
  }

 private:
  std::filesystem::path path_;
};

inline Config load_text(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const TempDir dir;
  return load_config(dir.write("c.yaml", text), overrides);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Runs the action, which must be refused as a config error: message and hint must contain these parts.
template <typename Action>
void require_refusal(Action action, const std::vector<std::string>& message, const std::vector<std::string>& hint) {
  std::optional<Error> error;
  try {
    action();
  } catch (const Error& thrown) {
    error = thrown;
  }
  REQUIRE(error.has_value());
  INFO("message: " << error->what());
  INFO("hint:    " << error->hint());
  CHECK(error->kind() == ErrorKind::kConfig);
  for (const std::string& part : message) CHECK(contains(error->what(), part));
  for (const std::string& part : hint) CHECK(contains(error->hint(), part));
  CHECK_FALSE(error->hint().empty());
}

}  // namespace invar
