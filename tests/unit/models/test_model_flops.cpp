#include "models/gemma4.h"
#include "models/model_flops.h"
#include "models/qwen3.h"
#include "support/catch.h"

using namespace invar;

TEST_CASE("Model FLOPs per token of the Qwen3 sizes") {
  struct Case {
    int64_t hidden, layers, heads, intermediate;
    double flops_per_token;  // at S = 4096, published with Megatron-LM's formula to the digits given
  };
  for (const auto& [hidden, layers, heads, intermediate, flops_per_token] :
       {Case{1024, 28, 16, 3072, 4.985e9}, Case{2048, 28, 16, 6144, 1.1732e10}, Case{2560, 36, 32, 9728, 2.7758e10},
        Case{4096, 36, 32, 12288, 4.9032e10}, Case{5120, 40, 40, 17408, 8.8973e10},
        Case{5120, 64, 64, 25600, 2.0479e11}}) {
    ModelConfig model;
    model.hidden_size = hidden;
    model.num_hidden_layers = layers;
    model.num_attention_heads = heads;
    model.num_key_value_heads = 8;
    model.head_dim = 128;
    model.intermediate_size = intermediate;
    model.vocab_size = 151936;
    const double flops = model_flops_per_step(qwen3_spec(model), 3, 4096);
    CHECK(flops / (3 * 4096) == Approx(flops_per_token).epsilon(1.5e-4));
  }
}

TEST_CASE("Model FLOPs of a small model, counted by hand") {
  ModelConfig model;
  model.hidden_size = 5;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 3;
  model.intermediate_size = 7;
  model.vocab_size = 100;
  // Multiply-adds per token and layer: q 5·12, k and v 2·5·6, o 12·5, MLP 3·5·7, attention 8·12 (S = 8); the head
  // 5·128.
  const double per_token = 2 * (60 + 60 + 60 + 105 + 96) + 640;
  CHECK(model_flops_per_step(qwen3_spec(model), 2, 8) == 6 * 16 * per_token);
}

TEST_CASE("Model FLOPs count a window by its pairs, missing projections not at all, and the per-layer inputs") {
  ModelConfig model;
  model.family = "gemma4";
  model.vocab_size = 128;
  model.hidden_size = 5;
  model.num_hidden_layers = 4;
  model.layer_types = "sf";
  model.num_kv_shared_layers = 2;
  model.sliding_window = 3;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 4;
  model.global_head_dim = 6;
  model.intermediate_size = 7;
  model.use_double_wide_mlp = true;
  model.hidden_size_per_layer_input = 8;
  // Pairs of a window of 3 in a sequence of 8, halves at both ends as in S²/2: 3·8 − 9/2 = 19.5; a full layer has 32.
  const double sliding = 2 * 5 * 16 + 2 * 19.5 / 8 * 16;  // q, o, attention
  const double full = 2 * 5 * 24 + 2 * 32.0 / 8 * 24;
  const double own = 2 * 5 * 8 + 2 * 5 * 12;  // k and v of layers 0 and 1
  const double mlp = 3 * 5 * (7 + 7 + 14 + 14);
  const double per_layer = 5 * 4 * 8 + 4 * 2 * 5 * 8;  // the model's projection; gates and projections
  const double per_token = 2 * sliding + 2 * full + own + mlp + per_layer + 5 * 128;
  CHECK(model_flops_per_step(gemma4_spec(model), 2, 8) == Approx(6 * 16 * per_token).epsilon(1e-14));
}
