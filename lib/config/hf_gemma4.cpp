#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "config/hf_families.h"
#include "config/layer_kinds.h"
#include "core/shown.h"

namespace invar {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSliding = "sliding_attention";
constexpr const char* kFull = "full_attention";
constexpr const char* kUseRelease = "use a Gemma 4 release, or give the field the value it has there";

void refuse_unsupported(const JsonObject& text) {
  const auto name = [&](const char* field) { return text.full_name(field); };
  if (text.boolean("enable_moe_block", false) || text.integer("num_experts") > 0) {
    const char* field = text.boolean("enable_moe_block", false) ? "enable_moe_block" : "num_experts";
    text.refuse(format("{} {}: mixture of experts is not supported yet", name(field), text.json(field)),
                "use a dense Gemma 4 model");
  }
  const std::string activation = text.text("hidden_activation", "gelu_pytorch_tanh");
  if (activation != "gelu_pytorch_tanh") {
    text.refuse(format("{} must be gelu_pytorch_tanh, not {}", name("hidden_activation"), shown(activation)),
                kUseRelease);
  }
  if (text.boolean("attention_bias", false)) {
    text.refuse(format("{} true is not supported", name("attention_bias")), kUseRelease);
  }
  if (text.number("attention_dropout", 0) != 0) {
    text.refuse(format("{} is not supported", name("attention_dropout")), "set it to 0, as in the Gemma 4 releases");
  }
  if (text.number("attn_logit_softcapping", 0) != 0) {
    text.refuse(format("{} is not supported", name("attn_logit_softcapping")), kUseRelease);
  }
  const std::string both_ways = text.text("use_bidirectional_attention", "vision");
  if (both_ways != "vision") {
    text.refuse(format("{} must be null or \"vision\", not {}", name("use_bidirectional_attention"),
                       text.json("use_bidirectional_attention")),
                "use a causal model");
  }
  // The row of the padding token gets no gradient from the lookup: invar freezes row 0.
  if (text.is_null("pad_token_id") || text.integer("pad_token_id", 0) != 0) {
    text.refuse(format("{} must be 0, not {}", name("pad_token_id"), text.json("pad_token_id")), kUseRelease);
  }
}

// One letter a layer.
std::string read_layer_letters(const JsonObject& text, int64_t layers) {
  std::string letters;
  for (const std::string& type : text.texts("layer_types")) {
    if (type != kSliding && type != kFull) {
      text.refuse(format("{} \"{}\" is not supported", text.full_name("layer_types"), shown(type)), kUseRelease);
    }
    letters += type == kSliding ? 's' : 'f';
  }
  if (static_cast<int64_t>(letters.size()) != layers) {
    text.refuse(format("{} has {} entries for {} layers", text.full_name("layer_types"), letters.size(), layers),
                "give one entry for each layer");
  }
  return letters;
}

// The shortest text that, repeated and cut, gives all letters; empty if no layer slides.
std::string shortest_pattern(const std::string& letters) {
  if (letters.find('s') == std::string::npos) return "";
  // border[i] is the length of the longest text that begins and ends letters[0, i] and is shorter.
  std::vector<size_t> border(letters.size(), 0);
  for (size_t i = 1; i < letters.size(); ++i) {
    size_t length = border[i - 1];
    while (length > 0 && letters[i] != letters[length]) length = border[length - 1];
    border[i] = letters[i] == letters[length] ? length + 1 : 0;
  }
  return letters.substr(0, letters.size() - border.back());
}

// What per_layer_config may set, of one layer.
struct HeadSizes {
  int64_t head_dim, key_value_heads;
  bool operator==(const HeadSizes&) const = default;
};

int64_t layer_number(const JsonObject& table, const std::string& name, int64_t layers) {
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (error != std::errc() || end != name.data() + name.size() || layer < 0 || layer >= layers) {
    table.refuse(format("{} is not one of {} layers", table.full_name(name), layers),
                 "key the entries by layer number, from 0");
  }
  return layer;
}

// The sizes of the full layers by per_layer_config, whose absent layers and fields are as `common`.
HeadSizes read_per_layer_config(const JsonObject& text, const std::string& letters, const HeadSizes& common) {
  if (text.is_null("per_layer_config")) return common;
  const JsonObject table = text.object("per_layer_config");
  const auto layers = static_cast<int64_t>(letters.size());
  std::map<int64_t, std::pair<std::string, HeadSizes>> entries;
  for (const std::string& name : table.names()) {
    const JsonObject entry = table.object(name);
    for (const std::string& field : entry.names()) {
      if (field == "head_dim" || field == "num_key_value_heads") continue;
      entry.refuse(format("{} is not supported", entry.full_name(field)),
                   "only head_dim and num_key_value_heads may differ between layers");
    }
    const HeadSizes sizes = {entry.integer("head_dim", common.head_dim),
                             entry.integer("num_key_value_heads", common.key_value_heads)};
    const std::string full_name = table.full_name(name);
    if (!entries.try_emplace(layer_number(table, name, layers), full_name, sizes).second) {
      table.refuse(format("{} names a layer that has an entry already", full_name), "keep one of the two");
    }
  }
  std::optional<HeadSizes> full;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto entry = entries.find(layer);
    const HeadSizes sizes = entry == entries.end() ? common : entry->second.second;
    const std::string name = entry == entries.end()
                                 ? format("{} without layer {}", text.full_name("per_layer_config"), layer)
                                 : entry->second.first;
    if (letters[static_cast<size_t>(layer)] == 's') {
      if (sizes != common) text.refuse(format("{} changes a sliding layer", name), "let full layers only differ");
    } else if (full && *full != sizes) {
      text.refuse(format("{} differs from an earlier full layer", name), "give all full layers the same sizes");
    } else {
      full = sizes;
    }
  }
  return full.value_or(common);
}

// The sizes of the full layers. transformers heeds global_head_dim (512 if absent) and num_global_key_value_heads only
// in files without per_layer_config, and the latter only with attention_k_eq_v.
HeadSizes read_full_sizes(const JsonObject& text, const std::string& letters, const HeadSizes& common) {
  if (text.has("per_layer_config") || text.is_null("per_layer_config")) {
    return read_per_layer_config(text, letters, common);
  }
  HeadSizes full = common;
  if (!text.is_null("global_head_dim")) full.head_dim = text.integer("global_head_dim", 512);
  if (text.boolean("attention_k_eq_v", false)) {
    full.key_value_heads = text.integer("num_global_key_value_heads", common.key_value_heads);
  }
  return full;
}

void read_heads(const JsonObject& text, const std::string& letters, ModelConfig& model) {
  const HeadSizes common = {text.integer("head_dim"), text.integer("num_key_value_heads")};
  const HeadSizes full = read_full_sizes(text, letters, common);
  if (model.layer_types.empty()) {  // no layer has the common sizes
    model.head_dim = full.head_dim;
    model.num_key_value_heads = full.key_value_heads;
    return;
  }
  model.head_dim = common.head_dim;
  model.num_key_value_heads = common.key_value_heads;
  model.global_head_dim = full.head_dim == common.head_dim ? 0 : full.head_dim;
  model.num_global_key_value_heads = full.key_value_heads == common.key_value_heads ? 0 : full.key_value_heads;
}

// The settings of one layer type; refuses what scales or cuts the rotation in a way that is not supported.
JsonObject read_rope(const JsonObject& all, const char* layer_type, bool may_be_proportional) {
  all.require({layer_type});
  JsonObject rope = all.object(layer_type);
  const std::string kind = rope.text("rope_type", "default");
  const bool is_proportional = may_be_proportional && kind == "proportional";
  if (!is_proportional && kind != "default") {
    rope.refuse(format("{} {} is not supported", rope.full_name("rope_type"), shown(kind)), kUseRelease);
  }
  if (!is_proportional && rope.number("partial_rotary_factor", 1.0) != 1.0) {
    rope.refuse(format("{} is not supported with rope_type default", rope.full_name("partial_rotary_factor")),
                kUseRelease);
  }
  if (rope.number("factor", 1.0) != 1.0) {
    rope.refuse(format("{} is not supported", rope.full_name("factor")), "use a model without rotary scaling");
  }
  rope.require({"rope_theta"});
  return rope;
}

void read_rotary(const JsonObject& text, const std::string& letters, ModelConfig& model) {
  if (!text.has("rope_parameters")) {  // the defaults of the transformers class
    model.rope_theta = 1e6;
    model.partial_rotary_factor = 0.25;
    return;
  }
  const JsonObject all = text.object("rope_parameters");
  if (letters.find('s') != std::string::npos) {
    model.sliding_rope_theta = read_rope(all, kSliding, false).number("rope_theta", 0);
  }
  if (letters.find('f') == std::string::npos) return;
  const JsonObject full = read_rope(all, kFull, true);
  model.rope_theta = full.number("rope_theta", 0);
  model.partial_rotary_factor = full.number("partial_rotary_factor", 1.0);
}

void read_per_layer_inputs(const JsonObject& text, ModelConfig& model) {
  if (text.is_null("hidden_size_per_layer_input")) return;
  model.hidden_size_per_layer_input = text.integer("hidden_size_per_layer_input", 256);
  const int64_t vocabulary = text.integer("vocab_size_per_layer_input", 262144);
  if (model.hidden_size_per_layer_input == 0 || vocabulary == model.vocab_size) return;
  text.refuse(format("{} is {} and vocab_size is {}", text.full_name("vocab_size_per_layer_input"), vocabulary,
                     model.vocab_size),
              "only per-layer inputs of the whole vocabulary are supported");
}

}  // namespace

ModelConfig read_hf_gemma4(const JsonObject& text, bool unified) {
  refuse_unsupported(text);
  ModelConfig model;
  model.family = "gemma4";
  read_hf_common(text, model);
  text.require({"head_dim", "layer_types"});
  const std::string letters = read_layer_letters(text, model.num_hidden_layers);
  model.layer_types = shortest_pattern(letters);
  read_heads(text, letters, model);
  read_rotary(text, letters, model);
  // The remaining defaults are those of the transformers classes.
  model.max_position_embeddings = text.integer("max_position_embeddings", unified ? 262144 : 131072);
  model.tie_word_embeddings = text.boolean("tie_word_embeddings", true);
  if (!model.layer_types.empty()) model.sliding_window = text.integer("sliding_window", unified ? 1024 : 512);
  model.attention_k_eq_v = text.boolean("attention_k_eq_v", false);
  model.num_kv_shared_layers = text.integer("num_kv_shared_layers", 0);
  model.use_double_wide_mlp = text.boolean("use_double_wide_mlp", false);
  model.final_logit_softcapping = text.number("final_logit_softcapping", 0);
  if (!unified) read_per_layer_inputs(text, model);
  return model;
}

std::string to_hf_gemma4(const ModelConfig& model, const std::string& dtype) {
  Json layer_types = Json::array();
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    layer_types.push_back(is_sliding(model, layer) ? kSliding : kFull);
  }
  const int64_t global_heads = model.num_global_key_value_heads;
  const Json json = {
      {"architectures", Json::array({"Gemma4ForCausalLM"})},
      {"model_type", "gemma4_text"},
      {"vocab_size", model.vocab_size},
      {"hidden_size", model.hidden_size},
      {"intermediate_size", model.intermediate_size},
      {"num_hidden_layers", model.num_hidden_layers},
      {"num_attention_heads", model.num_attention_heads},
      {"num_key_value_heads", model.num_key_value_heads},
      {"head_dim", model.head_dim},
      {"layer_types", layer_types},
      {"sliding_window", model.sliding_window > 0 ? model.sliding_window : 512},
      // Every version that has Gemma 4 reads this form; the newest themselves write per_layer_config.
      {"global_head_dim", model.global_head_dim > 0 ? model.global_head_dim : model.head_dim},
      {"num_global_key_value_heads", global_heads > 0 ? Json(global_heads) : Json(nullptr)},
      {"attention_k_eq_v", model.attention_k_eq_v},
      {"num_kv_shared_layers", model.num_kv_shared_layers},
      {"use_double_wide_mlp", model.use_double_wide_mlp},
      {"hidden_size_per_layer_input", model.hidden_size_per_layer_input},
      {"vocab_size_per_layer_input", model.vocab_size},
      {"rope_parameters",
       {{kSliding, {{"rope_type", "default"}, {"rope_theta", model.sliding_rope_theta}}},
        {kFull,
         {{"rope_type", "proportional"},
          {"rope_theta", model.rope_theta},
          {"partial_rotary_factor", model.partial_rotary_factor}}}}},
      {"max_position_embeddings", model.max_position_embeddings},
      {"rms_norm_eps", model.rms_norm_eps},
      {"initializer_range", model.initializer_range},
      {"final_logit_softcapping",
       model.final_logit_softcapping > 0 ? Json(model.final_logit_softcapping) : Json(nullptr)},
      {"tie_word_embeddings", model.tie_word_embeddings},
      {"hidden_activation", "gelu_pytorch_tanh"},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"use_bidirectional_attention", nullptr},
      {"enable_moe_block", false},
      {"pad_token_id", 0},
      {"eos_token_id", 1},
      {"bos_token_id", 2},
      {"use_cache", true},
      {"dtype", dtype},
  };
  return json.dump(2) + "\n";
}

}  // namespace invar
