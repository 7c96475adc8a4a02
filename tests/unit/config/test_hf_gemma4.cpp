#include <nlohmann/json.hpp>

#include "config/hf_config.h"
#include "config/presets.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;
using Json = nlohmann::ordered_json;

namespace {

const std::string kReference = std::string(INVAR_SOURCE_DIR) + "/tests/reference/";

// Four layers in the form of the released files.
Json valid_json() {
  return Json::parse(R"({"model_type": "gemma4_text", "vocab_size": 250, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": true, "sliding_window": 8,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_parameters": {
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
      "full_attention": {"rope_type": "proportional", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}})");
}

ModelConfig read_json(const Json& json) {
  const TemporaryFolder folder;
  folder.write("config.json", json.dump());
  ModelConfig model = read_hf_config(folder.path().string());
  CHECK_FALSE(model.hf_path.empty());
  model.hf_path.clear();
  return model;
}

// The valid file with other fields, given as a JSON object; {"field": "absent"} removes one.
Json with(const std::string& fields) {
  Json json = valid_json();
  const Json changes = Json::parse(fields);
  for (const auto& change : changes.items()) {
    json[change.key()] = change.value();
    if (change.value() == "absent") json.erase(change.key());
  }
  return json;
}

ModelConfig read_with(const std::string& fields) {
  return read_json(with(fields));
}

void refuses(const std::string& fields, const std::string& message, const std::string& hint) {
  INFO(fields);
  require_error(ErrorKind::kConfig, {"config.json: " + message}, {hint}, [&] { read_with(fields); });
}

// Another spelling of the full layers' sizes.
std::string per_layer(const std::string& entries) {
  return R"({"global_head_dim": "absent", "num_global_key_value_heads": "absent", "per_layer_config": )" + entries +
         "}";
}

}  // namespace

TEST_CASE("the config.json of the gemma4_e4b case is read") {
  ModelConfig expected;
  expected.family = "gemma4";
  expected.hf_path = kReference + "gemma4_e4b";
  expected.vocab_size = 250;
  expected.hidden_size = 48;
  expected.intermediate_size = 64;
  expected.num_hidden_layers = 12;
  expected.num_attention_heads = 8;
  expected.num_key_value_heads = 2;
  expected.head_dim = 16;
  expected.max_position_embeddings = 131072;
  expected.tie_word_embeddings = true;
  expected.layer_types = "sssssf";
  expected.sliding_window = 8;
  expected.global_head_dim = 32;
  expected.partial_rotary_factor = 0.25;
  expected.num_kv_shared_layers = 5;
  expected.hidden_size_per_layer_input = 24;
  expected.final_logit_softcapping = 30;
  CHECK(read_hf_config(kReference + "gemma4_e4b") == expected);
}

TEST_CASE("the config.json of the gemma4_dense case is read") {
  const ModelConfig model = read_hf_config(kReference + "gemma4_dense");
  CHECK(model.layer_types == "sssssf");
  CHECK(model.num_key_value_heads == 4);
  CHECK(model.num_global_key_value_heads == 2);
  CHECK(model.head_dim == 16);
  CHECK(model.global_head_dim == 32);
  CHECK(model.attention_k_eq_v);
  CHECK(model.hidden_size_per_layer_input == 0);  // and vocab_size_per_layer_input has no effect
  CHECK(model.num_kv_shared_layers == 0);
}

TEST_CASE("the layer list becomes the shortest pattern") {
  const auto pattern = [](const std::string& letters) {
    Json json = valid_json();
    json["num_hidden_layers"] = letters.size();
    json["layer_types"] = Json::array();
    for (char c : letters) json["layer_types"].push_back(c == 's' ? "sliding_attention" : "full_attention");
    return read_json(json).layer_types;
  };
  CHECK(pattern("sfsf") == "sf");
  CHECK(pattern("sfsfs") == "sf");
  CHECK(pattern("sssssf") == "sssssf");
  CHECK(pattern("ssfssfs") == "ssf");
  CHECK(pattern("ssfsf") == "ssfsf");
  CHECK(pattern("fsf") == "fs");
  CHECK(pattern("sss") == "s");
  CHECK(pattern("ff").empty());
}

TEST_CASE("both forms of the full layers' sizes are read alike") {
  const ModelConfig model = read_json(valid_json());
  CHECK(model.head_dim == 16);
  CHECK(model.global_head_dim == 32);
  CHECK(model.num_key_value_heads == 4);
  CHECK(model.num_global_key_value_heads == 2);
  const std::string full = R"({"head_dim": 32, "num_key_value_heads": 2})";
  CHECK(read_with(per_layer(R"({"1": )" + full + R"(, "03": )" + full + "}")) == model);
  // Entries may repeat what holds for all layers, and the other form does not count beside this one.
  const std::string plain = R"({"head_dim": 16, "num_key_value_heads": 4})";
  CHECK(read_with(R"({"global_head_dim": 64, "per_layer_config": {"0": )" + plain + R"(, "1": )" + full + R"(, "3": )" +
                  full + "}}") == model);

  refuses(per_layer(R"({"1": {"head_dim": 32}})"), "per_layer_config without layer 3 differs from an earlier full",
          "the same sizes");
  refuses(per_layer(R"({"1": {"head_dim": 32}, "3": {"head_dim": 64}})"),
          "per_layer_config.3 differs from an earlier full layer", "the same sizes");
  refuses(per_layer(R"({"00": {"head_dim": 32}})"), "per_layer_config.00 changes a sliding layer", "full layers");
  refuses(per_layer(R"({"4": {"head_dim": 32}})"), "per_layer_config.4 is not one of 4 layers", "by layer number");
  refuses(per_layer(R"({"-1": {"head_dim": 32}})"), "per_layer_config.-1 is not one of 4 layers", "by layer number");
  refuses(per_layer(R"({"1x": {"head_dim": 32}})"), "per_layer_config.1x is not one of 4 layers", "by layer number");
  refuses(per_layer(R"({"1": {}, "01": {}})"), "per_layer_config.01 names a layer that has an entry", "one of the two");
  refuses(per_layer(R"({"1": {"intermediate_size": 4}})"), "per_layer_config.1.intermediate_size is not supported",
          "only head_dim");
  refuses(per_layer(R"({"1": {"head_dim": "x"}})"), "per_layer_config.1.head_dim must be an integer", "again");
  refuses(per_layer(R"({"1": {"head_dim": 9223372036854775808}})"),
          "per_layer_config.1.head_dim must be an integer below 2^63, not 9223372036854775808", "again");
  refuses(per_layer(R"({"1": 3})"), "per_layer_config.1 must be an object, not 3", "again");
}

TEST_CASE("sizes of the full layers that equal the others are not set") {
  CHECK(read_with(R"({"global_head_dim": 16, "num_global_key_value_heads": 4})").global_head_dim == 0);
  CHECK(read_with(R"({"global_head_dim": 16, "num_global_key_value_heads": 4})").num_global_key_value_heads == 0);
  CHECK(read_with(R"({"global_head_dim": null})").global_head_dim == 0);
  CHECK(read_with(R"({"global_head_dim": "absent"})").global_head_dim == 512);  // the default of the class
  CHECK(read_with(R"({"num_global_key_value_heads": null})").num_global_key_value_heads == 0);
  CHECK(read_with(R"({"attention_k_eq_v": false})").num_global_key_value_heads == 0);  // as in transformers
  CHECK(read_with(per_layer("null")).global_head_dim == 0);
  CHECK(read_with(per_layer("{}")).global_head_dim == 0);

  const ModelConfig full = read_with(
      R"({"num_hidden_layers": 1, "layer_types": ["full_attention"],
          "rope_parameters": {"full_attention": {"rope_theta": 1e6}}})");
  CHECK(full.head_dim == 32);
  CHECK(full.num_key_value_heads == 2);
  CHECK(full.global_head_dim == 0);
  CHECK(full.num_global_key_value_heads == 0);
  CHECK(full.sliding_window == 0);
}

TEST_CASE("the rotary settings of both layer types are read") {
  const ModelConfig model = read_json(valid_json());
  CHECK(model.rope_theta == 5e6);
  CHECK(model.sliding_rope_theta == 1e4);
  CHECK(model.partial_rotary_factor == 0.5);
  const auto rope = [](const std::string& sliding, const std::string& full) {
    return R"({"rope_parameters": {"sliding_attention": )" + sliding + R"(, "full_attention": )" + full + "}}";
  };
  const std::string plain = R"({"rope_type": "default", "rope_theta": 2e4})";
  CHECK(read_with(rope(plain, plain)).sliding_rope_theta == 2e4);
  CHECK(read_with(rope(plain, plain)).rope_theta == 2e4);
  CHECK(read_with(rope(plain, plain)).partial_rotary_factor == 1.0);
  CHECK(read_with(rope(plain, R"({"rope_type": "proportional", "rope_theta": 1e6, "factor": 1.0})"))
            .partial_rotary_factor == 1.0);
  const ModelConfig absent = read_with(R"({"rope_parameters": "absent"})");
  CHECK(absent.rope_theta == 1e6);
  CHECK(absent.sliding_rope_theta == 1e4);
  CHECK(absent.partial_rotary_factor == 0.25);

  const std::string name = "rope_parameters.";
  refuses(rope(plain, "null"), "missing rope_parameters.full_attention", "add the fields");
  refuses(rope("null", plain), "missing rope_parameters.sliding_attention", "add the fields");
  refuses(rope(R"({"rope_type": "default"})", plain), "missing rope_parameters.sliding_attention.rope_theta", "add");
  refuses(rope(R"({"rope_type": "proportional", "rope_theta": 1e4})", plain),
          name + "sliding_attention.rope_type proportional is not supported", "Gemma 4 release");
  refuses(rope(plain, R"({"rope_type": "yarn", "rope_theta": 1e4})"),
          name + "full_attention.rope_type yarn is not supported", "Gemma 4 release");
  refuses(rope(plain, R"({"rope_theta": 1e4, "partial_rotary_factor": 0.5})"),
          name + "full_attention.partial_rotary_factor is not supported with rope_type default", "Gemma 4 release");
  refuses(rope(plain, R"({"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0})"),
          name + "full_attention.factor is not supported", "without rotary scaling");
}

TEST_CASE("absent gemma4 fields take the defaults of the transformers class") {
  const ModelConfig model = read_with(
      R"({"vocab_size": 262144, "attention_k_eq_v": "absent", "sliding_window": "absent",
          "hidden_size_per_layer_input": "absent", "final_logit_softcapping": null})");
  CHECK(model.max_position_embeddings == 131072);
  CHECK(model.rms_norm_eps == 1e-6);
  CHECK(model.initializer_range == 0.02);
  CHECK(model.tie_word_embeddings);
  CHECK(model.sliding_window == 512);
  CHECK_FALSE(model.attention_k_eq_v);
  CHECK_FALSE(model.use_double_wide_mlp);
  CHECK(model.num_kv_shared_layers == 0);
  CHECK(model.hidden_size_per_layer_input == 256);
  CHECK(model.final_logit_softcapping == 0);
  CHECK(read_with(R"({"hidden_size_per_layer_input": null})").hidden_size_per_layer_input == 0);
  CHECK_FALSE(read_with(R"({"tie_word_embeddings": false})").tie_word_embeddings);
  CHECK(read_with(R"({"use_double_wide_mlp": true, "num_kv_shared_layers": 2})").use_double_wide_mlp);
}

TEST_CASE("the text model of a multimodal file is read") {
  const auto nest = [](const std::string& model_type, Json text) {
    text["model_type"] = model_type + "_text";
    return Json{{"model_type", model_type}, {"text_config", text}, {"vision_config", {{"hidden_size", 7}}}};
  };
  CHECK(read_json(nest("gemma4", valid_json())) == read_json(valid_json()));
  const ModelConfig unified = read_json(nest("gemma4_unified", with(R"({"sliding_window": "absent",
      "hidden_size_per_layer_input": "absent"})")));
  CHECK(unified.hidden_size_per_layer_input == 0);
  CHECK(unified.sliding_window == 1024);
  CHECK(unified.max_position_embeddings == 262144);

  const auto refuses_file = [](const Json& json, const std::string& message, const std::string& hint) {
    INFO(json.dump());
    require_error(ErrorKind::kConfig, {"config.json: " + message}, {hint}, [&] { read_json(json); });
  };
  refuses_file(Json{{"model_type", "gemma4"}}, "missing text_config", "add the fields");
  refuses_file(Json{{"model_type", "gemma4"}, {"text_config", 3}}, "text_config must be an object, not 3", "again");
  refuses_file(nest("gemma4", with(R"({"hidden_size": null})")), "missing text_config.hidden_size", "add the fields");
  refuses_file(nest("gemma4", with(R"({"quantization_config": {}})")), "text_config.quantization_config", "bf16");
  refuses_file(nest("gemma4", with(R"({"tie_word_embeddings": false})")),
               "tie_word_embeddings and text_config.tie_word_embeddings differ", "keep the right one");
  Json json = nest("gemma4", valid_json());
  json["tie_word_embeddings"] = false;
  CHECK_FALSE(read_json(json).tie_word_embeddings);
  json["text_config"]["model_type"] = "gemma3_text";
  refuses_file(json, "text_config.model_type must be gemma4_text, not gemma3_text", "Gemma 4 release");
}

TEST_CASE("a gemma4 config.json that invar cannot honour is refused by field") {
  refuses(R"({"enable_moe_block": true})", "enable_moe_block true: mixture of experts is not supported yet", "dense");
  refuses(R"({"num_experts": 8})", "num_experts 8: mixture of experts is not supported yet", "dense");
  refuses(R"({"hidden_activation": "silu"})", "hidden_activation must be gelu_pytorch_tanh, not silu", "release");
  refuses(R"({"attention_bias": true})", "attention_bias true is not supported", "release");
  refuses(R"({"attention_dropout": 0.1})", "attention_dropout is not supported", "set it to 0");
  refuses(R"({"attn_logit_softcapping": 50.0})", "attn_logit_softcapping is not supported", "release");
  refuses(R"({"use_bidirectional_attention": "all"})", "use_bidirectional_attention must be null or \"vision\"",
          "causal");
  CHECK(read_with(R"({"use_bidirectional_attention": "vision"})") == read_json(valid_json()));
  refuses(R"({"pad_token_id": 1})", "pad_token_id must be 0, not 1", "release");
  refuses(R"({"pad_token_id": null})", "pad_token_id must be 0, not null", "release");
  CHECK(read_with(R"({"pad_token_id": 0})") == read_json(valid_json()));
  refuses(R"({"quantization_config": {"bits": 4}})", "quantization_config: quantised weights", "bf16 release");
  refuses(R"({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100})",
          "vocab_size_per_layer_input is 100 and vocab_size is 250", "whole vocabulary");
  refuses(R"({"hidden_size_per_layer_input": 8})", "vocab_size_per_layer_input is 262144", "whole vocabulary");
  refuses(R"({"num_hidden_layers": 5})", "layer_types has 4 entries for 5 layers", "one entry for each layer");
  refuses(R"({"layer_types": ["chunked_attention"]})", "layer_types \"chunked_attention\" is not supported", "release");
  refuses(R"({"layer_types": [1]})", "layer_types must be a list of strings, not [1]", "again");
  refuses(R"({"layer_types": "absent", "head_dim": null})", "missing head_dim, layer_types", "add the fields");
}

TEST_CASE("an exported gemma4 config.json is read back to the same model") {
  std::vector<ModelConfig> models = {read_json(valid_json())};
  for (const char* name : {"gemma4_e4b", "gemma4_dense"}) models.push_back(read_hf_config(kReference + name));
  models.push_back(read_with(R"({"global_head_dim": 16, "num_global_key_value_heads": null,
      "final_logit_softcapping": null, "tie_word_embeddings": false, "num_kv_shared_layers": 2,
      "use_double_wide_mlp": true})"));
  models.push_back(read_with(R"({"num_hidden_layers": 1, "layer_types": ["full_attention"]})"));
  for (const std::string_view name : preset_names()) {
    models.push_back(preset_model(name));
    models.back().preset.clear();
  }
  for (ModelConfig& model : models) {
    model.hf_path.clear();
    const std::string text = to_hf_config(model, Precision::kBF16);
    INFO(text);
    CHECK(read_json(Json::parse(text)) == model);
  }
  const Json json = Json::parse(to_hf_config(preset_model("gemma4-12b"), Precision::kF32));
  CHECK(json["architectures"][0] == "Gemma4ForCausalLM");
  CHECK(json["model_type"] == "gemma4_text");
  CHECK(json["dtype"] == "float32");
  CHECK(json["layer_types"].size() == 48);
  CHECK(json["layer_types"][5] == "full_attention");
  CHECK(json["layer_types"][6] == "sliding_attention");
  CHECK(json["global_head_dim"] == 512);
  CHECK(json["num_global_key_value_heads"] == 1);
  CHECK(json["rope_parameters"]["full_attention"]["rope_type"] == "proportional");
  CHECK(json["pad_token_id"] == 0);
}
