#include <string>

#include "config/key_table.h"
#include "config/layer_kinds.h"
#include "config/presets.h"
#include "config/units.h"
#include "config/validation.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

// The parameters of the text model, the scalar of each layer included.
int64_t parameter_count(const ModelConfig& m) {
  const int64_t hidden = m.hidden_size, per_layer = m.hidden_size_per_layer_input, layers = m.num_hidden_layers;
  int64_t count = m.vocab_size * hidden + hidden;
  if (per_layer > 0) count += (m.vocab_size + hidden) * layers * per_layer + per_layer;
  for (int64_t i = 0; i < layers; ++i) {
    const int64_t head = layer_head_dim(m, i), keys = hidden * head * layer_key_value_heads(m, i);
    const bool has_values = is_sliding(m, i) || !m.attention_k_eq_v;
    count += 2 * hidden * head * m.num_attention_heads + head + 4 * hidden + 1;
    if (!shares_key_values(m, i)) count += (has_values ? 2 : 1) * keys + head;
    count += 3 * hidden * layer_intermediate_size(m, i);
    if (per_layer > 0) count += 2 * hidden * per_layer + hidden;
  }
  return count;
}

constexpr const char* kTrain = "train: {steps: 100, sequence_length: 32}\n";

// Twelve layers like those of E4B, of which five share; 8 query heads.
Config small_config() {
  return load_text(std::string(R"(
model: {family: gemma4, vocab_size: 250, hidden_size: 48, intermediate_size: 64, num_hidden_layers: 12,
        num_attention_heads: 8, num_key_value_heads: 4, head_dim: 16, layer_types: sssssf, sliding_window: 8,
        global_head_dim: 32, partial_rotary_factor: 0.25, num_kv_shared_layers: 5, use_double_wide_mlp: true,
        hidden_size_per_layer_input: 24, final_logit_softcapping: 30}
)") + kTrain);
}

template <typename Change>
void accepts(Change change) {
  Config config = small_config();
  change(config.model);
  CHECK_NOTHROW(validate(config, 4));
}

template <typename Change>
void refuses(Change change, const std::string& message, const std::string& hint) {
  Config config = small_config();
  config.origin.clear();
  change(config.model);
  INFO("expected: " << message);
  require_error(ErrorKind::kConfig, {message}, {hint}, [&] { validate(config, 4); });
}

using M = ModelConfig;

template <typename T, typename V>
auto set(T M::*member, V value) {
  return [=](M& m) { m.*member = static_cast<T>(value); };
}

Config preset_config(const std::string& preset, int tensor, bool uneven = false) {
  Config config = load_text("model: {preset: " + preset + "}\n" + kTrain);
  config.parallel.tensor = tensor;
  config.parallel.uneven = uneven;
  return config;
}

void refuses_tensor(const Config& config, const std::string& message, const std::string& hint) {
  INFO("expected: " << message);
  require_error(ErrorKind::kConfig, {message}, {hint}, [&] { validate(config, config.parallel.tensor); });
}

}  // namespace

TEST_CASE("gemma4 presets have the parameter counts of the releases' text models") {
  for (const auto& [name, count] : {std::pair{"gemma4-e2b", 4'628'569'379},
                                    {"gemma4-e4b", 7'463'013'418},
                                    {"gemma4-12b", 11'907'350'320},
                                    {"gemma4-31b", 30'697'345'340}}) {
    INFO(name);
    const ModelConfig model = preset_model(name);
    CHECK(parameter_count(model) == count);
    CHECK(model.family == "gemma4");
    CHECK(model.preset == name);
    CHECK(model.rope_theta == 1e6);
    CHECK(model.sliding_rope_theta == 1e4);
    CHECK(model.partial_rotary_factor == 0.25);
    CHECK(model.rms_norm_eps == 1e-6);
    CHECK(model.final_logit_softcapping == 30);
    const bool is_small = model.hidden_size_per_layer_input > 0;
    CHECK(model.sliding_window == (is_small ? 512 : 1024));
    CHECK(model.max_position_embeddings == (is_small ? 131072 : 262144));
    CHECK(model.attention_k_eq_v == !is_small);
  }
}

TEST_CASE("a gemma4 preset in YAML holds and is written back") {
  const std::string text =
      std::string("model: {preset: gemma4-e4b, num_hidden_layers: 24, num_kv_shared_layers: 6}\n") + kTrain;
  const Config config = load_text(text);
  CHECK_NOTHROW(validate(config, 8));
  CHECK(config.model.num_hidden_layers == 24);
  CHECK(config.model.hidden_size == 2560);
  const std::string printed = to_yaml(config);
  CHECK(contains(printed, "  family: gemma4\n  preset: gemma4-e4b\n"));
  CHECK(contains(printed, "  layer_types: sssssf\n  sliding_window: 512\n"));
  CHECK(load_text(printed).model == config.model);
}

TEST_CASE("other families refuse the keys of gemma4") {
  for (const char* entry : {"layer_types: sf", "sliding_window: 8", "sliding_rope_theta: 5000", "global_head_dim: 64",
                            "num_global_key_value_heads: 2", "partial_rotary_factor: 0.5", "attention_k_eq_v: true",
                            "num_kv_shared_layers: 2", "use_double_wide_mlp: true", "hidden_size_per_layer_input: 8",
                            "final_logit_softcapping: 30"}) {
    const std::string key = std::string(entry).substr(0, std::string(entry).find(':'));
    const Config config = load_text("model:\n  preset: qwen3-0.6b\n  " + std::string(entry) + "\n" + kTrain);
    require_error(ErrorKind::kConfig, {"c.yaml:3: model." + key, "would be ignored with model.family: qwen3"},
                  {"remove model." + key}, [&] { validate(config, 1); });
  }
}

TEST_CASE("gemma4 layer types and window") {
  accepts([](M&) {});
  accepts([](M& m) { m.layer_types = "sf", m.num_kv_shared_layers = 4; });
  accepts([](M& m) { m.tie_word_embeddings = true; });
  refuses(set(&M::layer_types, "ssfx"), "model.layer_types = ssfx may hold only s (sliding) and f (full)", "sssssf");
  refuses(set(&M::layer_types, "sssss"), "makes the last of model.num_hidden_layers = 12 layers a sliding one",
          "end the pattern with f");
  refuses(set(&M::num_hidden_layers, 11), "makes the last of model.num_hidden_layers = 11 layers a sliding one",
          "multiple of its length");
  refuses(set(&M::sliding_window, 0), "sliding layers, which need model.sliding_window", "set model.sliding_window");
  refuses(set(&M::sliding_window, -1), "model.sliding_window = -1 must be 1 to", "at least 1");
  refuses(set(&M::sliding_rope_theta, 0), "model.sliding_rope_theta = 0 must be above 0", "model.sliding_rope_theta");
  refuses(set(&M::sliding_rope_theta, 0.5), "model.sliding_rope_theta = 0.5: below 1", "such as 10000");
  refuses(set(&M::rope_theta, 1e-6), "model.rope_theta = 1e-06: below 1", "such as 10000");
  const auto all_full = [](auto change) {
    return [=](M& m) {
      m.layer_types = "f", m.sliding_window = 0, m.global_head_dim = 0;
      change(m);
    };
  };
  accepts(all_full([](M&) {}));
  accepts(all_full([](M& m) { m.layer_types.clear(); }));
  refuses(all_full(set(&M::sliding_window, 8)), "model.sliding_window = 8 would be ignored when no layer slides",
          "remove model.sliding_window");
  refuses(all_full(set(&M::sliding_rope_theta, 5e3)), "model.sliding_rope_theta = 5000 would be ignored when no layer",
          "remove model.sliding_rope_theta");
  refuses(all_full(set(&M::global_head_dim, 32)), "model.global_head_dim = 32 needs sliding layers",
          "set model.head_dim and remove model.global_head_dim");
  refuses(all_full([](M& m) { m.num_global_key_value_heads = 2, m.attention_k_eq_v = true; }),
          "model.num_global_key_value_heads = 2 needs sliding layers", "set model.num_key_value_heads");
}

TEST_CASE("gemma4 heads of the full layers") {
  const auto global_heads = [](int heads) {
    return [=](M& m) { m.attention_k_eq_v = true, m.num_global_key_value_heads = heads; };
  };
  accepts(global_heads(2));
  accepts(set(&M::attention_k_eq_v, true));
  refuses(global_heads(3), "model.num_global_key_value_heads = 3 does not divide model.num_attention_heads = 8",
          "use 1, 2, 4 or 8");
  refuses(global_heads(-1), "model.num_global_key_value_heads = -1 must be 0 to", "at least 0");
  refuses(set(&M::num_global_key_value_heads, 2),
          "model.num_global_key_value_heads = 2 needs model.attention_k_eq_v: true", "set model.attention_k_eq_v");
  refuses(set(&M::num_key_value_heads, 3), "model.num_key_value_heads = 3 does not divide", "use 1, 2, 4 or 8");
  refuses(set(&M::global_head_dim, 33), "model.global_head_dim = 33 is odd", "use 32 or 34");
  refuses(set(&M::global_head_dim, -2), "model.global_head_dim = -2 must be 0 to", "at least 0");
  refuses(set(&M::head_dim, 15), "model.head_dim = 15 is odd", "use 14 or 16");
  accepts(set(&M::partial_rotary_factor, 1));
  accepts(set(&M::partial_rotary_factor, 0.0625));  // one pair of 32
  refuses(set(&M::partial_rotary_factor, 0.06), "model.partial_rotary_factor = 0.06 turns no pair of the full layers'",
          "use 0.25");
  refuses(set(&M::partial_rotary_factor, 0), "model.partial_rotary_factor = 0 must be above 0 and at most 1", "0.25");
  refuses(set(&M::partial_rotary_factor, 1.5), "model.partial_rotary_factor = 1.5 must be above 0", "0.25");
}

TEST_CASE("gemma4 shared layers, per-layer inputs and softcap") {
  accepts(set(&M::num_kv_shared_layers, 6));
  refuses(set(&M::num_kv_shared_layers, 7),
          "model.num_kv_shared_layers = 7: layer 5 is a full one, and none of that type has keys", "share fewer");
  refuses([](M& m) { m.layer_types = "fsf", m.num_hidden_layers = 3, m.num_kv_shared_layers = 2; },
          "model.num_kv_shared_layers = 2: layer 1 is a sliding one", "share fewer");
  refuses(set(&M::num_kv_shared_layers, 12), "model.num_kv_shared_layers = 12 must be less than", "use at most 11");
  refuses(set(&M::num_kv_shared_layers, -1), "model.num_kv_shared_layers = -1 must be 0 to", "at least 0");
  refuses(set(&M::num_kv_shared_layers, 0), "model.use_double_wide_mlp: true widens the sharing layers",
          "model.use_double_wide_mlp: false");
  accepts(set(&M::hidden_size_per_layer_input, 0));
  refuses(set(&M::hidden_size_per_layer_input, -1), "model.hidden_size_per_layer_input = -1 must be 0 to", "at least");
  accepts(set(&M::final_logit_softcapping, 0));
  refuses(set(&M::final_logit_softcapping, -1), "model.final_logit_softcapping = -1 must be above 0", "above 0");
  refuses(set(&M::final_logit_softcapping, 1e-60), "in fp32, where it becomes 0", "above 0");
}

TEST_CASE("tensor cuts whole units of a gemma4 model") {
  for (const int tensor : {1, 2, 4, 8}) CHECK_NOTHROW(validate(preset_config("gemma4-e4b", tensor), tensor));
  refuses_tensor(preset_config("gemma4-e4b", 3),
                 "parallel.tensor = 3 does not divide 8 query heads (model.num_attention_heads)",
                 "use 1, 2, 4 or 8 (at 3 ranks 1), or parallel.uneven: true");
  CHECK_NOTHROW(validate(preset_config("gemma4-e4b", 3, true), 3));
  const auto fitting = [](const char* preset) {
    Config config;
    config.model = preset_model(preset);
    return fitting_tensor_degrees(config, false);
  };
  CHECK(fitting("gemma4-12b") == std::vector<int>{1, 2, 4, 8, 16});
  CHECK(fitting("gemma4-31b") == std::vector<int>{1, 2, 4, 8, 16, 32});
  CHECK(fitting("gemma4-e2b") == std::vector<int>{1, 2, 4, 8});

  // 12 query heads, 2 KV heads in the full layers: 3 would leave them unequally replicated.
  const auto heads = [](int query, int kv, int global) {
    Config config = preset_config("gemma4-12b", 3);
    config.model.num_attention_heads = query;
    config.model.num_key_value_heads = kv;
    config.model.num_global_key_value_heads = global;
    return config;
  };
  CHECK_NOTHROW(validate(heads(12, 6, 1), 3));
  refuses_tensor(heads(12, 6, 2), "is no multiple of 2 key and value heads (model.num_global_key_value_heads)",
                 "parallel.uneven: true");
  refuses_tensor(heads(12, 6, 4), "does not divide 4 key and value heads (model.num_global_key_value_heads)",
                 "parallel.uneven: true");
  refuses_tensor(heads(12, 4, 1), "does not divide 4 key and value heads (model.num_key_value_heads)",
                 "parallel.uneven: true");
}

TEST_CASE("an MLP of twice the width can be cut wherever the plain one can") {
  for (int64_t width = 1; width <= 20000; ++width) {
    const int64_t plain = ffn_blocks(width), wide = ffn_blocks(2 * width);
    if (wide != plain && wide != 2 * plain) FAIL(width);
  }
  Config config = preset_config("gemma4-e2b", 4);
  config.model.intermediate_size = 2240;
  refuses_tensor(config, "parallel.tensor = 4 does not divide 70 FFN blocks of 32 columns (model.intermediate_size)",
                 "use 1 or 2, or parallel.uneven: true");
  config.model.intermediate_size = 3;
  config.parallel.uneven = true;
  refuses_tensor(config, "parallel.tensor = 4 exceeds 3 FFN blocks of 1 columns (model.intermediate_size)",
                 "use at most 3");
}

TEST_CASE("tensor cuts blocks of the per-layer inputs") {
  // 24 columns are 8 blocks of 3, 20 are 10 of 2, 3 are 3 of 1.
  Config config = preset_config("gemma4-e4b", 4);
  config.model.hidden_size_per_layer_input = 24;
  CHECK_NOTHROW(validate(config, 4));
  config.model.hidden_size_per_layer_input = 20;
  refuses_tensor(config, "parallel.tensor = 4 does not divide 10 blocks of 2 columns of the per-layer inputs",
                 "or parallel.uneven: true");
  config.parallel.uneven = true;
  CHECK_NOTHROW(validate(config, 4));
  config.model.hidden_size_per_layer_input = 3;
  refuses_tensor(config, "parallel.tensor = 4 exceeds 3 blocks of 1 columns of the per-layer inputs", "use at most 3");
}
