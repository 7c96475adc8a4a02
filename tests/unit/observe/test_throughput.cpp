#include <cmath>

#include "observe/activation_dump.h"
#include "observe/throughput.h"
#include "support/catch.h"

using namespace invar;

static_assert(std::has_virtual_destructor_v<TensorSink> && std::is_abstract_v<TensorSink>);

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
    const double flops = model_flops_per_step(model, 151936, 3, 4096);
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
  // Multiply-adds per token and layer: q 5·12, k and v 2·5·6, o 12·5, MLP 3·5·7, attention 8·12 (S = 8); the head 5·11.
  const double per_token = 2 * (60 + 60 + 60 + 105 + 96) + 55;
  CHECK(model_flops_per_step(model, 11, 2, 8) == 6 * 16 * per_token);
}

TEST_CASE("Speed is that of the last step") {
  Throughput throughput(3e12, 2);
  CHECK(throughput.tokens_per_s() == 0);
  CHECK(throughput.tflops_per_device() == 0);
  throughput.record(4.0, 1000);
  throughput.record(0.5, 1000);
  CHECK(throughput.tokens_per_s() == 2000);
  CHECK(throughput.tflops_per_device() == 3);  // 3e12 FLOPs in half a second on two devices
}

TEST_CASE("The time left is smoothed and ignores the first step") {
  Throughput throughput(1, 1);
  CHECK(std::isnan(throughput.seconds_left(10)));
  throughput.record(100.0, 1);  // warm-up
  CHECK(std::isnan(throughput.seconds_left(9)));
  throughput.record(2.0, 1);
  CHECK(throughput.seconds_left(8) == 16);
  throughput.record(3.0, 1);  // average 2 + 0.1 · (3 − 2)
  CHECK(throughput.seconds_left(10) == Approx(21).epsilon(1e-12));
  CHECK(throughput.seconds_left(0) == 0);
  for (int i = 0; i < 200; ++i) throughput.record(5.0, 1);
  CHECK(throughput.seconds_left(1) == Approx(5).epsilon(1e-6));
}
