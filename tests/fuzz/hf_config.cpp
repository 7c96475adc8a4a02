// The config.json of a Hugging Face folder.
#include "config/hf_config.h"
#include "config/validate_model.h"
#include "fuzz/fuzz_input.h"

using namespace invar;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::file("config.json", fuzz::text_of(data, size));
  Config config;
  const auto read = [&] { config.model = read_hf_config(fuzz::folder()); };
  if (!fuzz::reads_or_refuses({"config.json"}, read)) return 0;
  config.origin[""] = "config.json";
  fuzz::reads_or_refuses({"config.json"}, [&] { validate_model(config); });
  return 0;
}
