#include <map>

#include "config/key_table.h"
#include "config/validation.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

// Every file of configs/ loads and holds in a world that it is made for, and on the smallest that can run it.
TEST_CASE("the configs of the repository hold") {
  const std::map<std::string, int> worlds = {{"quickstart.yaml", 4},  {"qwen3_0.6b.yaml", 8},  {"qwen3_1.7b.yaml", 8},
                                             {"qwen3_4b.yaml", 8},    {"qwen3_8b.yaml", 16},   {"qwen3_14b.yaml", 32},
                                             {"qwen3_32b.yaml", 64},  {"gemma4_e2b.yaml", 8},  {"gemma4_e4b.yaml", 8},
                                             {"gemma4_12b.yaml", 32}, {"gemma4_31b.yaml", 64}, {"bench.yaml", 2}};
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(INVAR_SOURCE_DIR) + "/configs")) {
    if (entry.path().extension() != ".yaml") continue;
    const std::string name = entry.path().filename().string();
    INFO(name);
    REQUIRE(worlds.count(name) == 1);
    const Config config = load_config(entry.path().string());
    CHECK_NOTHROW(validate(config, worlds.at(name)));
    CHECK_NOTHROW(validate(config, config.parallel.tensor));
    CHECK_THROWS_AS(validate(config, 0), Error);
    CHECK_FALSE(config.log.dir.empty());
    // What a run leaves behind starts the same run.
    CHECK_NOTHROW(validate(load_text(to_yaml(config)), worlds.at(name)));
    ++found;
  }
  CHECK(found == worlds.size());
}
