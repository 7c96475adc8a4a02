// A config: a YAML text, and behind a zero byte the overrides of a command line, one a line.
#include "config/key_table.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = fuzz::text_of(data, size);
  const size_t end = input.find('\0');
  std::vector<std::string> overrides;
  for (size_t begin = end; begin < input.size();) {
    const size_t next = std::min(input.find('\n', begin + 1), input.size());
    overrides.emplace_back(input.substr(begin + 1, next - begin - 1));
    begin = next;
  }
  Config config;
  const bool loaded = fuzz::reads_or_refuses({"c.yaml", "argument "}, [&] {
    config = load_config_text(std::string(input.substr(0, end)), "c.yaml", overrides);
  });
  if (!loaded || !fuzz::reads_or_refuses({"c.yaml", "argument ", "config.json"}, [&] { validate(config, 1); }))
    return 0;
  // What is accepted is written as YAML that says the same.
  Config again = load_config_text(to_yaml(config), "again.yaml");
  again.origin = config.origin;
  fuzz::expect(again == config, "the config that a run writes is another one");
  return 0;
}
