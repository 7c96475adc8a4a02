#include "config/layer_kinds.h"

#include <vector>

#include "config/presets.h"
#include "support/errors.h"

using namespace invar;

namespace {

template <typename Predicate>
std::vector<int64_t> layers_where(const ModelConfig& model, Predicate holds) {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (holds(model, layer)) layers.push_back(layer);
  }
  return layers;
}

bool is_full(const ModelConfig& model, int64_t layer) {
  return !is_sliding(model, layer);
}

}  // namespace

TEST_CASE("a model without layer types has equal layers") {
  const ModelConfig model = preset_model("qwen3-0.6b");
  for (int64_t layer : {int64_t{0}, model.num_hidden_layers - 1}) {
    CHECK_FALSE(is_sliding(model, layer));
    CHECK(layer_head_dim(model, layer) == 128);
    CHECK(layer_key_value_heads(model, layer) == 8);
    CHECK(layer_intermediate_size(model, layer) == 3072);
    CHECK_FALSE(shares_key_values(model, layer));
    CHECK(key_value_source(model, layer) == layer);
    CHECK_FALSE(provides_key_values(model, layer));
  }
}

TEST_CASE("layers of Gemma 4 E4B") {
  const ModelConfig model = preset_model("gemma4-e4b");
  CHECK(layers_where(model, is_full) == std::vector<int64_t>{5, 11, 17, 23, 29, 35, 41});
  CHECK(layers_where(model, provides_key_values) == std::vector<int64_t>{22, 23});
  CHECK(layers_where(model, shares_key_values).front() == 24);
  CHECK(layers_where(model, shares_key_values).size() == 18);
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    INFO(layer);
    CHECK(key_value_source(model, layer) == (layer < 24 ? layer : is_sliding(model, layer) ? 22 : 23));
    CHECK(layer_head_dim(model, layer) == (is_sliding(model, layer) ? 256 : 512));
    CHECK(layer_key_value_heads(model, layer) == 2);
    CHECK(layer_intermediate_size(model, layer) == 10240);
  }
}

TEST_CASE("layers of Gemma 4 E2B") {
  const ModelConfig model = preset_model("gemma4-e2b");
  CHECK(layers_where(model, is_full) == std::vector<int64_t>{4, 9, 14, 19, 24, 29, 34});
  CHECK(layers_where(model, provides_key_values) == std::vector<int64_t>{13, 14});
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    INFO(layer);
    CHECK(shares_key_values(model, layer) == (layer >= 15));
    CHECK(key_value_source(model, layer) == (layer < 15 ? layer : is_sliding(model, layer) ? 13 : 14));
    CHECK(layer_key_value_heads(model, layer) == 1);
    CHECK(layer_intermediate_size(model, layer) == (layer < 15 ? 6144 : 12288));
  }
}

TEST_CASE("full layers of Gemma 4 12B have their own heads") {
  const ModelConfig model = preset_model("gemma4-12b");
  CHECK(layer_key_value_heads(model, 4) == 8);
  CHECK(layer_key_value_heads(model, 5) == 1);
  CHECK(layer_head_dim(model, 4) == 256);
  CHECK(layer_head_dim(model, 5) == 512);
  CHECK(layers_where(model, provides_key_values).empty());
}

TEST_CASE("a sharing layer without a layer of its type before it has no source") {
  ModelConfig model = preset_model("gemma4-e4b");
  model.layer_types = "ssf";
  model.num_hidden_layers = 3;
  model.num_kv_shared_layers = 1;
  CHECK(key_value_source(model, 2) == -1);
  CHECK(key_value_source(model, 1) == 1);
}
