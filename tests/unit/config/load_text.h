#pragma once

#include <string>
#include <vector>

#include "config/yaml_loader.h"
#include "support/temporary_folder.h"

namespace invar::test {

// The config of a file c.yaml with this text.
inline Config load_text(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const TemporaryFolder folder;
  return load_config(folder.write("c.yaml", text), overrides);
}

}  // namespace invar::test
