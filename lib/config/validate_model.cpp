#include "config/validate_model.h"

#include "config/key_table.h"
#include "config/layer_kinds.h"
#include "config/refuse.h"
#include "config/suggest.h"

namespace invar {
namespace {

// Far above any model. They keep searches short, and the sizes of tensors within 63 bits.
constexpr int64_t kMostHeads = 1 << 16;
constexpr int64_t kMostLayers = 1 << 12;
constexpr int64_t kLargestHead = 1 << 12;
constexpr int64_t kWidest = 1 << 20;  // of the residual stream and of the inputs of layers
constexpr int64_t kWidestMlp = 1 << 22;
constexpr int64_t kLargestVocabulary = 1 << 24;

// Keys that no other family knows.
constexpr std::string_view kGemma4Only[] = {"model.layer_types",
                                            "model.sliding_window",
                                            "model.sliding_rope_theta",
                                            "model.global_head_dim",
                                            "model.num_global_key_value_heads",
                                            "model.partial_rotary_factor",
                                            "model.attention_k_eq_v",
                                            "model.num_kv_shared_layers",
                                            "model.use_double_wide_mlp",
                                            "model.hidden_size_per_layer_input",
                                            "model.final_logit_softcapping"};

void check_source(const Config& config) {
  const ModelConfig& model = config.model;
  if (model.family != "qwen3" && model.family != "gemma4") {
    refuse(config, {"model.family"}, format("unknown model.family {}", model.family),
           "use model.family: qwen3 or gemma4");
  }
  if (model.init == InitKind::kHuggingFace && model.hf_path.empty()) {
    refuse(config, {"model.init"}, "model.init: hf needs model.hf_path",
           "set model.hf_path to the folder of the weights, or model.init: random");
  }
  std::string missing;
  for (const Key& key : key_table()) {
    if (key.section == "model" && key.when_absent == Default::kRequired && has_default(key, config)) {
      missing += (missing.empty() ? "" : ", ") + std::string(key.name);
    }
  }
  if (!missing.empty()) {
    refuse(config, {"model.hf_path", "model.preset"}, format("section model lacks {}", missing),
           format("give them, or model.preset: {} (or another size), or model.hf_path: a Hugging Face folder",
                  model.family == "gemma4" ? "gemma4-e4b" : "qwen3-0.6b"));
  }
}

void check_rope_base(const Config& config, std::string_view key, double base) {
  check_positive(config, key, base, UsedAs::kF64);
  if (base >= 1) return;
  refuse(config, {key}, format("{} = {}: below 1, angles grow with the dim", key, base),
         "use the model's, such as 10000");
}

void check_even_head(const Config& config, const std::string& key, int64_t head_dim) {
  if (head_dim % 2 == 0) return;
  refuse(config, {key}, format("{} = {} is odd: rotary positions turn pairs", key, head_dim),
         format("use {} or {}", head_dim - 1, head_dim + 1));
}

void check_divides_query_heads(const Config& config, const std::string& key, int64_t key_value_heads) {
  const int64_t query_heads = config.model.num_attention_heads;
  if (query_heads % key_value_heads == 0) return;
  std::vector<int> divisors;
  for (int64_t heads = 1; heads <= query_heads; ++heads) {
    if (query_heads % heads == 0) divisors.push_back(static_cast<int>(heads));
  }
  refuse(config, {key, "model.num_attention_heads"},
         format("{} = {} does not divide model.num_attention_heads = {}", key, key_value_heads, query_heads),
         format("use {} key and value heads", join_numbers(divisors)));
}

void check_shape(const Config& config) {
  const ModelConfig& model = config.model;
  check_count(config, "model.vocab_size", model.vocab_size, 1, kLargestVocabulary);
  check_count(config, "model.hidden_size", model.hidden_size, 1, kWidest);
  check_count(config, "model.intermediate_size", model.intermediate_size, 1, kWidestMlp);
  check_count(config, "model.num_hidden_layers", model.num_hidden_layers, 1, kMostLayers);
  check_count(config, "model.num_attention_heads", model.num_attention_heads, 1, kMostHeads);
  check_count(config, "model.num_key_value_heads", model.num_key_value_heads, 1);
  check_count(config, "model.head_dim", model.head_dim, 2, kLargestHead);
  check_count(config, "model.max_position_embeddings", model.max_position_embeddings, 1);
  check_positive(config, "model.rms_norm_eps", model.rms_norm_eps);
  check_rope_base(config, "model.rope_theta", model.rope_theta);
  check_not_negative(config, "model.initializer_range", model.initializer_range);
  check_even_head(config, "model.head_dim", model.head_dim);
  check_divides_query_heads(config, "model.num_key_value_heads", model.num_key_value_heads);
}

// Returns whether any layer slides.
bool check_layer_types(const Config& config) {
  const ModelConfig& model = config.model;
  if (model.layer_types.find_first_not_of("sf") != std::string::npos) {
    refuse(config, {"model.layer_types"},
           format("model.layer_types = {} may hold only s (sliding) and f (full)", model.layer_types),
           "write one letter for each layer of the repeated pattern, such as sssssf");
  }
  if (is_sliding(model, model.num_hidden_layers - 1)) {
    refuse(config, {"model.layer_types", "model.num_hidden_layers"},
           format("model.layer_types = {} makes the last of model.num_hidden_layers = {} layers a sliding one, but it "
                  "must be full",
                  model.layer_types, model.num_hidden_layers),
           "end the pattern with f and use a multiple of its length as model.num_hidden_layers");
  }
  bool any_slides = false;
  for (int64_t layer = 0; layer < model.num_hidden_layers && !any_slides; ++layer) {
    any_slides = is_sliding(model, layer);
  }
  return any_slides;
}

void check_window(const Config& config, bool any_slides) {
  const ModelConfig& model = config.model;
  if (!any_slides) {
    refuse_if_set(config, "model.sliding_window", "when no layer slides (model.layer_types)");
    refuse_if_set(config, "model.sliding_rope_theta", "when no layer slides (model.layer_types)");
    return;
  }
  check_rope_base(config, "model.sliding_rope_theta", model.sliding_rope_theta);
  if (model.sliding_window == 0) {
    refuse(config, {"model.layer_types"},
           format("model.layer_types = {} has sliding layers, which need model.sliding_window", model.layer_types),
           "set model.sliding_window, such as 512");
  }
  check_count(config, "model.sliding_window", model.sliding_window, 1);
}

void check_full_heads(const Config& config, bool any_slides) {
  const ModelConfig& model = config.model;
  check_count(config, "model.global_head_dim", model.global_head_dim, 0, kLargestHead);
  check_count(config, "model.num_global_key_value_heads", model.num_global_key_value_heads, 0);
  for (const auto& [global, plain, value] :
       {std::tuple{"model.global_head_dim", "model.head_dim", model.global_head_dim},
        {"model.num_global_key_value_heads", "model.num_key_value_heads", model.num_global_key_value_heads}}) {
    if (any_slides || value == 0) continue;
    refuse(config, {global}, format("{} = {} needs sliding layers: every layer is a full one", global, value),
           format("set {} and remove {}", plain, global));
  }
  if (model.num_global_key_value_heads > 0) {
    if (!model.attention_k_eq_v) {
      refuse(config, {"model.num_global_key_value_heads", "model.attention_k_eq_v"},
             format("model.num_global_key_value_heads = {} needs model.attention_k_eq_v: true",
                    model.num_global_key_value_heads),
             "set model.attention_k_eq_v: true, or remove model.num_global_key_value_heads");
    }
    check_divides_query_heads(config, "model.num_global_key_value_heads", model.num_global_key_value_heads);
  }
  check_even_head(config, "model.global_head_dim", model.global_head_dim);
}

void check_partial_rotary(const Config& config) {
  const ModelConfig& model = config.model;
  const double factor = model.partial_rotary_factor;
  const std::string hint = "use 0.25, as in the releases, or 1 to turn the whole head";
  if (!(factor > 0 && factor <= 1)) {
    refuse(config, {"model.partial_rotary_factor"},
           format("model.partial_rotary_factor = {} must be above 0 and at most 1", factor), hint);
  }
  const int64_t head_dim = layer_head_dim(model, model.num_hidden_layers - 1);
  if (factor * static_cast<double>(head_dim) / 2 < 1) {
    refuse(config, {"model.partial_rotary_factor"},
           format("model.partial_rotary_factor = {} turns no pair of the full layers' head_dim = {}", factor, head_dim),
           hint);
  }
}

void check_shared_layers(const Config& config) {
  const ModelConfig& model = config.model;
  check_count(config, "model.num_kv_shared_layers", model.num_kv_shared_layers, 0);
  if (model.num_kv_shared_layers >= model.num_hidden_layers) {
    refuse(config, {"model.num_kv_shared_layers", "model.num_hidden_layers"},
           format("model.num_kv_shared_layers = {} must be less than model.num_hidden_layers = {}",
                  model.num_kv_shared_layers, model.num_hidden_layers),
           format("use at most {}", model.num_hidden_layers - 1));
  }
  for (int64_t layer = model.num_hidden_layers - model.num_kv_shared_layers; layer < model.num_hidden_layers; ++layer) {
    if (key_value_source(model, layer) >= 0) continue;
    refuse(config, {"model.num_kv_shared_layers", "model.layer_types"},
           format("model.num_kv_shared_layers = {}: layer {} is a {} one, and none of that type has keys and values of "
                  "its own",
                  model.num_kv_shared_layers, layer, is_sliding(model, layer) ? "sliding" : "full"),
           "share fewer layers");
  }
  if (model.use_double_wide_mlp && model.num_kv_shared_layers == 0) {
    refuse(config, {"model.use_double_wide_mlp", "model.num_kv_shared_layers"},
           "model.use_double_wide_mlp: true widens the sharing layers, but model.num_kv_shared_layers is 0",
           "set model.num_kv_shared_layers, or model.use_double_wide_mlp: false");
  }
}

void check_gemma4(const Config& config) {
  const bool any_slides = check_layer_types(config);
  check_window(config, any_slides);
  check_full_heads(config, any_slides);
  check_partial_rotary(config);
  check_shared_layers(config);
  check_count(config, "model.hidden_size_per_layer_input", config.model.hidden_size_per_layer_input, 0, kWidest);
  if (config.model.final_logit_softcapping != 0) {  // 0: none
    check_positive(config, "model.final_logit_softcapping", config.model.final_logit_softcapping);
  }
}

}  // namespace

void validate_model(const Config& config) {
  check_source(config);
  check_shape(config);
  if (config.model.family == "gemma4") return check_gemma4(config);
  for (std::string_view key : kGemma4Only) {
    refuse_if_set(config, key, format("with model.family: {}", config.model.family));
  }
}

}  // namespace invar
