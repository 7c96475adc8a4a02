#include <nlohmann/json.hpp>

#include "config/hf_config.h"
#include "config/presets.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;
using Json = nlohmann::ordered_json;

namespace {

// Q, K, V, O, the two head norms, the two layer norms and the gated MLP per layer; final norm; embedding and head.
int64_t parameter_count(const ModelConfig& m) {
  const int64_t q = m.num_attention_heads * m.head_dim, kv = m.num_key_value_heads * m.head_dim;
  const int64_t layer = 2 * m.hidden_size * q + 2 * m.hidden_size * kv + 2 * m.head_dim + 2 * m.hidden_size +
                        3 * m.hidden_size * m.intermediate_size;
  return m.num_hidden_layers * layer + m.hidden_size + m.vocab_size * m.hidden_size * (m.tie_word_embeddings ? 1 : 2);
}

Json valid_json() {
  return Json::parse(R"({"model_type": "qwen3", "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rope_theta": 5e6})");
}

ModelConfig read_json(const std::string& text) {
  const TemporaryFolder folder;
  folder.write("config.json", text);
  return read_hf_config(folder.path().string());
}

// The valid file with one field set to a value.
ModelConfig read_with(const std::string& field, const std::string& value) {
  Json json = valid_json();
  json[field] = Json::parse(value);
  return read_json(json.dump());
}

void refuses(const std::string& field, const std::string& value, const std::string& message, const std::string& hint) {
  INFO(field << " = " << value);
  require_error(ErrorKind::kConfig, {"config.json: " + message}, {hint}, [&] { read_with(field, value); });
}

}  // namespace

TEST_CASE("qwen3 presets have the published parameter counts") {
  const std::vector<std::pair<std::string_view, int64_t>> published = {
      {"qwen3-0.6b", 596'049'920}, {"qwen3-1.7b", 1'720'574'976}, {"qwen3-4b", 4'022'468'096},
      {"qwen3-8b", 8'190'735'360}, {"qwen3-14b", 14'768'307'200}, {"qwen3-32b", 32'762'123'264}};
  REQUIRE(preset_names().size() > published.size());
  for (size_t i = 0; i < published.size(); ++i) {
    CHECK(preset_names()[i] == published[i].first);
    const ModelConfig model = preset_model(published[i].first);
    CHECK(parameter_count(model) == published[i].second);
    CHECK(model.preset == published[i].first);
    CHECK(model.family == "qwen3");
    CHECK(model.head_dim == 128);
    CHECK(model.rope_theta == 1e6);
    CHECK(model.rms_norm_eps == 1e-6);
    CHECK(model.max_position_embeddings == 40960);
  }
}

TEST_CASE("unknown and unsupported presets are refused") {
  const auto refuses_preset = [](const char* name, const char* message, const char* hint) {
    INFO(name);
    require_error(ErrorKind::kConfig, {message}, {hint, "qwen3-0.6b, qwen3-1.7b"}, [&] { preset_model(name); });
    require_error(ErrorKind::kConfig, {std::string("c.yaml:2: "), message}, {hint},
                  [&] { load_text(std::string("log: {every: 1}\nmodel: {preset: ") + name + "}\n"); });
  };
  refuses_preset("qwen3-06b", "unknown model.preset qwen3-06b", "did you mean qwen3-0.6b?");
  refuses_preset("Qwen3-8B", "unknown model.preset Qwen3-8B", "did you mean qwen3-8b?");
  refuses_preset("llama", "unknown model.preset llama", "use qwen3-0.6b");
  refuses_preset("qwen3-30b-a3b", "mixture of experts, which is not supported yet", "use a dense size");
  refuses_preset("qwen3-235b-a22b", "mixture of experts, which is not supported yet", "use a dense size");
  refuses_preset("gemma4-26b-a4b", "mixture of experts, which is not supported yet", "use a dense size");
  refuses_preset("gemma4-e4", "unknown model.preset gemma4-e4", "did you mean gemma4-e4b?");
  refuses_preset("gemma-3-27b-it", "unknown model.preset gemma-3-27b-it", "gemma4-31b");
}

TEST_CASE("the config.json of the reference cases is read") {
  const std::string reference = std::string(INVAR_SOURCE_DIR) + "/tests/reference/";
  const ModelConfig tied = read_hf_config(reference + "qwen3");
  ModelConfig expected;
  expected.hf_path = reference + "qwen3";
  expected.vocab_size = 250;
  expected.hidden_size = 48;
  expected.intermediate_size = 96;
  expected.num_hidden_layers = 4;
  expected.num_attention_heads = 8;
  expected.num_key_value_heads = 4;
  expected.head_dim = 16;
  expected.max_position_embeddings = 32768;
  expected.tie_word_embeddings = true;
  CHECK(tied == expected);

  const ModelConfig untied = read_hf_config(reference + "qwen3_untied");
  CHECK(untied.vocab_size == 256);
  CHECK(untied.head_dim == 32);
  CHECK(untied.intermediate_size == 80);
  CHECK(untied.num_key_value_heads == 2);
  CHECK_FALSE(untied.tie_word_embeddings);
}

TEST_CASE("both forms of the rotary settings are read") {
  CHECK(read_json(valid_json().dump()).rope_theta == 5e6);
  CHECK(read_with("rope_scaling", "null").rope_theta == 5e6);
  CHECK(read_with("rope_scaling", R"({"rope_type": "default"})").rope_theta == 5e6);
  CHECK(read_with("rope_parameters", R"({"rope_type": "default", "rope_theta": 5e6})").rope_theta == 5e6);
  Json json = valid_json();
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_theta", 10000}};
  CHECK(read_json(json.dump()).rope_theta == 1e4);

  json["rope_parameters"] = {{"rope_theta", "big"}};
  require_error(ErrorKind::kConfig, {"rope_parameters.rope_theta must be a number"}, {"again"},
                [&] { read_json(json.dump()); });
  json.erase("rope_parameters");
  require_error(ErrorKind::kConfig, {"config.json: missing rope_theta"}, {"no safe default"},
                [&] { read_json(json.dump()); });
  refuses("rope_parameters", R"({"rope_theta": 1e4})", "rope_theta is 5000000", "keep the right one");
  refuses("rope_scaling", R"({"type": "yarn", "factor": 4.0})", R"(rope_scaling {"factor":4.0,"type":"yarn"})",
          "without rotary");
  refuses("rope_scaling", R"({"rope_type": "linear", "factor": 2.0})", "rope_scaling", "without rotary scaling");
  refuses("rope_parameters", R"({"rope_type": "yarn", "rope_theta": 5e6})", "rope_parameters",
          "without rotary scaling");
  refuses("rope_parameters", R"({"partial_rotary_factor": 0.5})", "rope_parameters", "without rotary scaling");
  refuses("rope_scaling", "2.0", "rope_scaling 2.0 is not supported", "without rotary scaling");
}

TEST_CASE("absent fields take the defaults of the transformers class") {
  Json json = valid_json();
  json.erase("head_dim");
  const ModelConfig model = read_json(json.dump());
  CHECK(model.head_dim == 128);
  CHECK(model.max_position_embeddings == 32768);
  CHECK(model.rms_norm_eps == 1e-6);
  CHECK(model.initializer_range == 0.02);
  CHECK_FALSE(model.tie_word_embeddings);
}

TEST_CASE("a config.json that invar cannot honour is refused by field") {
  refuses("model_type", "\"qwen3_moe\"", "model_type qwen3_moe is not supported yet", "dense Qwen3");
  refuses("model_type", "\"gemma3_text\"", "model_type gemma3_text is not supported yet", "gemma4_text");
  refuses("model_type", "null", "missing model_type", "dense Qwen3");
  refuses("hidden_act", "\"gelu\"", "hidden_act must be silu, not gelu", "Qwen3");
  refuses("attention_bias", "true", "attention_bias true is not supported", "without attention biases");
  refuses("attention_dropout", "0.1", "attention_dropout is not supported", "set attention_dropout to 0");
  refuses("use_sliding_window", "true", "use_sliding_window true is not supported", "full attention");
  refuses("layer_types", R"(["full_attention", "sliding_attention"])", "layer_types \"sliding_attention\"",
          "full attention");
  refuses("quantization_config", R"({"bits": 4})", "quantization_config", "bf16 release");
  refuses("hidden_size", "\"48\"", "hidden_size must be an integer, not \"48\"", "again");
  refuses("hidden_size", "48.5", "hidden_size must be an integer, not 48.5", "again");
  refuses("rms_norm_eps", "\"1e-6\"", "rms_norm_eps must be a number", "again");
  refuses("tie_word_embeddings", "1", "tie_word_embeddings must be true or false, not 1", "again");
  refuses("model_type", "3", "model_type must be a string, not 3", "again");
  refuses("hidden_size", "null", "missing hidden_size", "add the fields");
  Json json = valid_json();
  json.erase("num_key_value_heads");
  json.erase("vocab_size");
  require_error(ErrorKind::kConfig, {"missing vocab_size, num_key_value_heads"}, {"add the fields"},
                [&] { read_json(json.dump()); });
  require_error(ErrorKind::kConfig, {"config.json:3: not valid JSON"}, {"again"},
                [] { read_json("{\n \"a\": 1,\n oops}"); });
  require_error(ErrorKind::kConfig, {"config.json: not a JSON object"}, {"again"}, [] { read_json("[]"); });
  require_error(ErrorKind::kConfig, {"config.json:1: not valid JSON"}, {"again"}, [] { read_json(""); });
  require_error(ErrorKind::kConfig, {"config.json:1: rms_norm_eps must be a number", "not 1e400"}, {"again"},
                [] { read_json(R"({"rms_norm_eps": 1e400, )" + valid_json().dump().substr(1)); });
  require_error(ErrorKind::kConfig, {"config.json: hidden_size is given twice"}, {"keep one"}, [] {
    const std::string text = valid_json().dump();
    read_json(R"({"hidden_size": 48, )" + text.substr(1));
  });
  require_error(ErrorKind::kConfig, {"config.json: more than 64 levels deep"}, {"again"},
                [] { read_json(R"({"rope_scaling": )" + std::string(100'000, '[')); });
  require_error(ErrorKind::kConfig, {"/nowhere/config.json: cannot be opened: No such file"}, {"Hugging Face"},
                [] { read_hf_config("/nowhere"); });
}

TEST_CASE("an exported config.json is read back to the same model") {
  for (const std::string_view name : preset_names()) {
    ModelConfig model = preset_model(name);
    model.rope_theta = 5e6;
    model.rms_norm_eps = 3e-7;
    model.initializer_range = 0.03;
    model.max_position_embeddings = 1000;
    ModelConfig read = read_json(to_hf_config(model, Precision::kBF16));
    CHECK_FALSE(read.hf_path.empty());
    read.hf_path.clear();
    model.preset.clear();
    CHECK(read == model);
  }
  const Json json = Json::parse(to_hf_config(preset_model("qwen3-8b"), Precision::kF32));
  CHECK(json["architectures"][0] == "Qwen3ForCausalLM");
  CHECK(json["model_type"] == "qwen3");
  CHECK(json["dtype"] == "float32");
  CHECK(json["torch_dtype"] == "float32");
  CHECK(json["rope_parameters"]["rope_theta"] == 1e6);
  CHECK(json["rope_theta"] == 1e6);
  CHECK(Json::parse(to_hf_config(preset_model("qwen3-8b"), Precision::kBF16))["dtype"] == "bfloat16");
}

TEST_CASE("the text model of a Qwen3 of several modalities is read, and other Qwen3 classes are refused by name") {
  const auto nest = [](const std::string& type, const std::string& text_type, const Json& outer) {
    Json json{{"model_type", type}, {"vision_config", {{"hidden_size", 7}}}, {"text_config", valid_json()}};
    json["text_config"]["model_type"] = text_type;
    json.update(outer);
    return json;
  };
  const auto same = [](ModelConfig a, ModelConfig b) {
    a.hf_path = b.hf_path;
    return a == b;
  };
  const ModelConfig plain = read_json(valid_json().dump());
  // Three positions to rotate by are one where all tokens are text. This is how transformers 4 writes them.
  Json vl = nest("qwen3_vl", "qwen3_vl_text", Json::object());
  vl["text_config"]["rope_scaling"] =
      Json{{"mrope_interleaved", true}, {"mrope_section", {4, 2, 2}}, {"rope_type", "default"}};
  CHECK(same(read_json(vl.dump()), plain));
  CHECK_FALSE(plain.tie_word_embeddings);
  ModelConfig tied = plain;
  tied.tie_word_embeddings = true;
  CHECK(same(read_json(nest("qwen3_vl", "qwen3_vl_text", {{"tie_word_embeddings", true}}).dump()), tied));
  // The outer field holds, as in transformers, which writes the inner one of its default class beside it.
  Json asr = nest("qwen3_asr", "qwen3", {{"tie_word_embeddings", true}});
  asr["text_config"]["tie_word_embeddings"] = false;
  CHECK(same(read_json(asr.dump()), tied));

  const auto refuses_file = [](const Json& json, const std::string& message, const std::string& hint) {
    INFO(json.dump());
    require_error(ErrorKind::kConfig, {"config.json: " + message}, {hint}, [&] { read_json(json.dump()); });
  };
  asr.erase("tie_word_embeddings");
  refuses_file(asr, "tie_word_embeddings and text_config.tie_word_embeddings differ", "keep the right one");
  refuses_file(nest("qwen3_vl", "qwen3_vl_moe_text", Json::object()), "text_config.model_type must be qwen3_vl_text",
               "Qwen3");
  vl["text_config"]["rope_scaling"]["rope_type"] = "yarn";
  refuses_file(vl, "text_config.rope_scaling {", "without rotary scaling");
  vl["text_config"].erase("rope_scaling");
  vl["text_config"]["attention_bias"] = true;
  refuses_file(vl, "text_config.attention_bias true is not supported", "without attention biases");
  vl["text_config"].erase("rope_theta");
  vl["text_config"].erase("attention_bias");
  refuses_file(vl, "missing text_config.rope_theta", "no safe default");
  for (const char* type : {"qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe",
                           "qwen3_vl_text", "gemma4_assistant", "gemma4_unified_assistant", "lighton_ocr"}) {
    refuses_file(nest(type, "qwen3", Json::object()), std::string("model_type ") + type + " is not supported yet",
                 "qwen3, gemma4_text, gemma4_unified_text, gemma4, gemma4_unified, qwen3_vl, qwen3_asr");
  }
}
