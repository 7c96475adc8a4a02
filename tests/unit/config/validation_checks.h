#pragma once

#include "config/validation.h"
#include "support/errors.h"

namespace invar::test {

// A config that holds at 4 ranks: 8 query heads, 4 KV heads, 96 FFN blocks, 16 vocabulary units.
inline Config valid_config() {
  Config config;
  config.model.vocab_size = 250;
  config.model.hidden_size = 48;
  config.model.intermediate_size = 96;
  config.model.num_hidden_layers = 4;
  config.model.num_attention_heads = 8;
  config.model.num_key_value_heads = 4;
  config.model.head_dim = 16;
  config.train.steps = 100;
  config.train.sequence_length = 32;
  return config;
}

// The valid config with something changed, in a world of 4 ranks unless told.
template <typename Change>
void accepts(Change change, int world_size = 4) {
  Config config = valid_config();
  change(config);
  CHECK_NOTHROW(validate(config, world_size));
}

template <typename Change>
void refuses(Change change, const std::string& message, const std::string& hint, int world_size = 4) {
  Config config = valid_config();
  change(config);
  INFO("expected: " << message);
  require_error(ErrorKind::kConfig, {message}, {hint}, [&] { validate(config, world_size); });
}

}  // namespace invar::test
