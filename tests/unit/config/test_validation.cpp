#include "config/validation.h"

#include <climits>
#include <cmath>

#include "config/resolved.h"
#include "config/units.h"
#include "load_text.h"
#include "support/errors.h"
#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("the example config holds") {
  accepts([](Config&) {});
  accepts([](Config&) {}, 1);
  CHECK_THROWS_AS(validate(valid_config(), 0), Error);
}

TEST_CASE("a refusal names the line or the argument of the key") {
  const std::string text = R"(model: {vocab_size: 256, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2,
        num_attention_heads: 6, num_key_value_heads: 6, head_dim: 16}
train: {steps: 10, sequence_length: 16}
parallel:
  tensor: 4
)";
  const std::string message = "parallel.tensor = 4 does not divide 6 query heads";
  const std::string hint = "use 1, 2, 3 or 6 (at 4 ranks 1 or 2), or parallel.uneven: true";
  require_error(ErrorKind::kConfig, {"c.yaml:5: " + message}, {hint}, [&] { validate(load_text(text), 4); });
  require_error(ErrorKind::kConfig, {"argument parallel.tensor=5: parallel.tensor = 5 does not divide"},
                {"use 1, 2, 3 or 6"}, [&] { validate(load_text(text, {"parallel.tensor=5"}), 4); });
  // The first key that was given counts: tensor is the default here.
  require_error(ErrorKind::kConfig, {"c.yaml:1: train.steps = 0 means that it is not set"}, {"set train.steps"},
                [&] { validate(load_text("train: {steps: 0}\nmodel: {preset: qwen3-0.6b}\n"), 1); });
}

TEST_CASE("sizes that no machine has are refused before anything is built") {
  const auto model = [](auto member, int64_t value) { return [member, value](Config& c) { c.model.*member = value; }; };
  const auto train = [](int64_t steps, int64_t length, int64_t micro, int64_t batch) {
    return [=](Config& c) {
      c.model.max_position_embeddings = INT_MAX;
      c.train.steps = steps, c.train.sequence_length = length;
      c.train.micro_batch_size = micro, c.train.global_batch_size = batch;
    };
  };
  using M = ModelConfig;
  refuses(model(&M::num_hidden_layers, 1000000), "model.num_hidden_layers = 1000000 must be 1 to 4096", "at most 4096");
  refuses(model(&M::intermediate_size, INT_MAX), "model.intermediate_size = 2147483647 must be 1 to 4194304",
          "at most");
  refuses(model(&M::hidden_size, 2000000), "model.hidden_size = 2000000 must be 1 to 1048576", "at most");
  refuses(model(&M::vocab_size, INT_MAX), "model.vocab_size = 2147483647 must be 1 to 16777216", "at most");
  refuses(model(&M::head_dim, 8192), "model.head_dim = 8192 must be 2 to 4096", "at most");
  refuses(train(1, 32, INT_MAX, 0), "train.micro_batch_size · train.sequence_length = 2147483647 · 32 exceeds",
          "smaller");
  refuses(train(1, 32, 1, INT_MAX), "train.global_batch_size = 2147483647 must be 0 to 16777216", "at most");
  refuses(train(1, 1, 1 << 23, 0), "a step of 33554432 samples", "smaller");
  refuses(train(INT_MAX, INT_MAX, 1, 1 << 24), "train.steps = 2147483647 of 16777216 samples of 2147483647 tokens",
          "fewer steps");
  accepts(train(INT_MAX, 4096, 1, 1 << 18));
  accepts(train(1, 32, 1 << 20, 0));
}

TEST_CASE("a refusal names the file where the key was not given") {
  require_error(ErrorKind::kConfig, {"c.yaml: train.steps is not set"}, {"set train.steps"},
                [&] { validate(load_text("model: {preset: qwen3-0.6b}\n"), 1); });
  require_error(ErrorKind::kConfig, {"c.yaml: section model lacks vocab_size"}, {"model.preset"},
                [&] { validate(load_text("train: {steps: 1}\n"), 1); });
}

TEST_CASE("model fields") {
  const auto set = [](auto member, auto value) {
    return
        [member, value](Config& c) { c.model.*member = static_cast<std::decay_t<decltype(c.model.*member)>>(value); };
  };
  using M = ModelConfig;
  refuses(set(&M::family, "llama"), "unknown model.family llama", "qwen3 or gemma4");
  refuses(set(&M::init, InitKind::kHuggingFace), "model.init: hf needs model.hf_path", "model.init: random");
  accepts([](Config& c) { c.model.init = InitKind::kHuggingFace, c.model.hf_path = "folder"; });
  accepts(set(&M::hf_path, "folder"));
  refuses([](Config& c) { c.model = {}; },
          "section model lacks vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, "
          "num_key_value_heads, head_dim",
          "model.preset: qwen3-0.6b");
  refuses(set(&M::head_dim, 0), "section model lacks head_dim", "give them");
  for (auto [member, name] : {std::pair{&M::vocab_size, "vocab_size"},
                              {&M::hidden_size, "hidden_size"},
                              {&M::intermediate_size, "intermediate_size"},
                              {&M::num_hidden_layers, "num_hidden_layers"},
                              {&M::num_attention_heads, "num_attention_heads"},
                              {&M::num_key_value_heads, "num_key_value_heads"},
                              {&M::head_dim, "head_dim"},
                              {&M::max_position_embeddings, "max_position_embeddings"}}) {
    refuses(set(member, -1), std::string("model.") + name + " = -1 must be", "to at least");
    refuses(set(member, int64_t{1} << 31), std::string("model.") + name + " = 2147483648 must be", "to at most");
  }
  refuses(set(&M::num_attention_heads, 65537), "model.num_attention_heads = 65537 must be 1 to 65536", "at most 65536");
  refuses(set(&M::head_dim, 15), "model.head_dim = 15 is odd", "use 14 or 16");
  refuses(set(&M::num_key_value_heads, 3), "model.num_key_value_heads = 3 does not divide", "use 1, 2, 4 or 8");
  refuses(set(&M::rms_norm_eps, 0.0), "model.rms_norm_eps = 0 must be above 0", "set model.rms_norm_eps");
  refuses(set(&M::rope_theta, -1.0), "model.rope_theta = -1 must be above 0", "set model.rope_theta");
  refuses(set(&M::initializer_range, -0.1), "model.initializer_range = -0.1 must be 0 or more", "0 or more");
}

TEST_CASE("the degrees must make up the world") {
  const auto layout = [](int tensor, int data) {
    return [=](Config& c) { c.parallel.tensor = tensor, c.parallel.data = data; };
  };
  accepts(layout(2, 0), 8);
  accepts(layout(2, 4), 8);
  accepts(layout(8, 0), 8);
  refuses(layout(2, 0), "3 ranks cannot be cut into replicas of parallel.tensor · parallel.gtp = 2 · 1 = 2 ranks",
          "start 2, 4, 6 … ranks (mpirun -n 4), or set parallel.tensor to 1", 3);
  refuses(layout(4, 0), "6 ranks cannot be cut", "set parallel.tensor to 1 or 2", 6);
  refuses(layout(2, 3), "parallel.tensor · gtp · data = 2 · 1 · 3 = 6, but the job has 4 ranks",
          "start 6 ranks (mpirun -n 6), or set parallel.data: auto (here 2)");
  refuses(layout(2, 1), "= 2, but the job has 3 ranks", "start 2 ranks", 3);
  refuses(layout(1, INT_MAX), "but the job has 4 ranks", "start 2147483647 ranks");
  refuses(layout(0, 0), "parallel.tensor = 0 must be 1 to", "at least 1");
  refuses(layout(1, -1), "parallel.data = -1 must be 0 to", "parallel.data");
  refuses([](Config& c) { c.parallel.gtp = 2; },
          "parallel.gtp = 2: generalised tensor parallelism is not available yet", "parallel.gtp: 1");
  refuses([](Config& c) { c.parallel.gtp = 0; }, "parallel.gtp = 0 must be 1 to", "parallel.gtp");
}

TEST_CASE("sequence parallelism at one tensor rank is the same mathematics") {
  accepts([](Config& c) { c.parallel.sequence = true; });
  accepts([](Config& c) { c.parallel.sequence = true, c.parallel.tensor = 4, c.train.sequence_length = 4; });
  refuses([](Config& c) { c.parallel.sequence = true, c.parallel.tensor = 4, c.train.sequence_length = 3; },
          "parallel.sequence: true shares 3 tokens of a micro-batch over 4 tensor ranks", "at least 4 tokens");
}

TEST_CASE("tensor cuts whole units") {
  const auto heads = [](int query, int kv, int tensor, bool uneven = false) {
    return [=](Config& c) {
      c.model.num_attention_heads = query, c.model.num_key_value_heads = kv;
      c.parallel.tensor = tensor, c.parallel.uneven = uneven;
    };
  };
  refuses(heads(8, 4, 3), "parallel.tensor = 3 does not divide 8 query heads (model.num_attention_heads)",
          "use 1, 2, 4 or 8 (at 3 ranks 1), or parallel.uneven: true", 3);
  accepts(heads(8, 4, 3, true), 3);
  accepts(heads(8, 2, 8), 8);  // each KV head on 4 ranks
  accepts(heads(8, 1, 4), 4);  // and on all
  refuses(heads(12, 4, 3), "does not divide 4 key and value heads (model.num_key_value_heads)", "uneven: true", 3);
  refuses(heads(12, 3, 4), "parallel.tensor = 4 is no multiple of 3 key and value heads (model.num_key_value_heads)",
          "use 1, 3, 6 or 12 (at 4 ranks 1), or parallel.uneven: true");
  accepts(heads(12, 2, 4));  // each KV head on 2 ranks, 3 of its query heads on each
  refuses(heads(12, 2, 3), "parallel.tensor = 3 is no multiple of 2 key", "use 1, 2, 4, 6 or 12 (at 3 ranks 1)", 3);
  accepts(heads(12, 2, 3, true), 3);
  refuses(heads(8, 4, 9, true), "parallel.tensor = 9 exceeds 8 query heads", "use at most 8", 9);
  refuses(heads(2, 2, 4), "parallel.tensor = 4 does not divide 2 query heads", "use 1 or 2");

  // 97 FFN blocks of one column: only 1 divides.
  const auto ffn = [](int64_t intermediate, int tensor, bool uneven) {
    return [=](Config& c) {
      c.model.intermediate_size = intermediate, c.parallel.tensor = tensor, c.parallel.uneven = uneven;
    };
  };
  refuses(ffn(97, 2, false), "parallel.tensor = 2 does not divide 97 FFN blocks of 1 columns (model.intermediate_size)",
          "use 1, or parallel.uneven: true");
  accepts(ffn(97, 2, true));
  refuses(ffn(3, 4, true), "parallel.tensor = 4 exceeds 3 FFN blocks of 1 columns", "use at most 3");
}

TEST_CASE("tensor does not exceed the vocabulary units") {
  const auto many_heads = [](int tensor) {
    return [=](Config& c) {
      c.model.vocab_size = 100, c.model.num_attention_heads = 16, c.model.num_key_value_heads = 16;
      c.parallel.tensor = tensor;
    };
  };
  accepts(many_heads(8), 8);
  refuses(many_heads(16), "parallel.tensor = 16 exceeds 8 vocabulary units of 16 rows (model.vocab_size)",
          "use 1, 2, 4 or 8", 16);
}

TEST_CASE("fitting degrees satisfy every rule") {
  Config config = valid_config();
  ModelConfig& model = config.model;
  CHECK(fitting_tensor_degrees(config, false) == std::vector<int>{1, 2, 4, 8});
  CHECK(fitting_tensor_degrees(config, true) == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8});
  model.num_attention_heads = 12;
  CHECK(fitting_tensor_degrees(config, false) == std::vector<int>{1, 2, 4, 12});
  model.intermediate_size = 98;  // 98 = 2 · 7²: neither 4 nor 12
  CHECK(fitting_tensor_degrees(config, false) == std::vector<int>{1, 2});
}

TEST_CASE("unit rules") {
  CHECK(ffn_block_width(3072) == 32);
  CHECK(ffn_block_width(25600) == 32);
  CHECK(ffn_block_width(2048) == 32);
  CHECK(ffn_block_width(2016) == 16);  // 63 blocks of 32
  CHECK(ffn_block_width(384) == 4);
  CHECK(ffn_block_width(96) == 1);
  CHECK(ffn_block_width(97) == 1);
  CHECK(ffn_block_width(1) == 1);
  CHECK(ffn_blocks(3072) == 96);
  CHECK(ffn_blocks(384) == 96);
  for (int64_t size = 1; size <= 4096; ++size) {
    const int64_t width = ffn_block_width(size);
    REQUIRE(size % width == 0);
    REQUIRE((width == 1 || size / width >= 64));
    // No larger admissible width.
    if (width < 32) REQUIRE_FALSE((size % (2 * width) == 0 && size / (2 * width) >= 64));
  }
  CHECK(padded_vocab_size(151936) == 151936);
  CHECK(padded_vocab_size(257) == 384);
  CHECK(padded_vocab_size(1) == 128);
  CHECK(padded_vocab_size(128) == 128);
  CHECK(vocab_units(257) == 24);
  CHECK(128 % kVocabUnit == 0);
}

TEST_CASE("batches") {
  const auto batch = [](int64_t micro, int64_t global) {
    return [=](Config& c) { c.train.micro_batch_size = micro, c.train.global_batch_size = global; };
  };
  accepts(batch(2, 0));
  accepts(batch(2, 24));
  refuses(batch(2, 12), "train.global_batch_size = 12 is not a multiple of train.micro_batch_size · data = 2 · 4 = 8",
          "use 8 or 16");
  refuses(batch(2, 7), "train.global_batch_size = 7 is not a multiple", "use 8, or another");
  refuses(batch(0, 0), "train.micro_batch_size = 0 must be 1 to", "at least 1");
  refuses(batch(1, -4), "train.global_batch_size = -4 must be 0 to", "train.global_batch_size");
}

TEST_CASE("training length and evaluation") {
  const auto set = [](auto member, int64_t value) { return [=](Config& c) { c.train.*member = value; }; };
  using T = TrainConfig;
  refuses(set(&T::steps, 0), "train.steps is not set", "set train.steps");
  refuses(set(&T::steps, -3), "train.steps = -3 must be 1 to", "at least 1");
  refuses(set(&T::sequence_length, 0), "train.sequence_length is not set", "set train.sequence_length");
  refuses(set(&T::sequence_length, -3), "train.sequence_length = -3 must be 1 to", "at least 1");
  accepts(set(&T::sequence_length, 40960));
  refuses(set(&T::sequence_length, 40961),
          "train.sequence_length = 40961 exceeds model.max_position_embeddings = 40960", "use at most 40960");
  refuses(set(&T::eval_every, -1), "train.eval_every = -1 must be 0 to", "train.eval_every");
  refuses(set(&T::eval_batches, 0), "train.eval_batches = 0 must be 1 to", "train.eval_batches");
  refuses(set(&T::eval_batches, 3), "train.eval_batches = 3 would be ignored with train.eval_every: 0", "remove");
  accepts([](Config& c) { c.train.eval_every = 10, c.train.eval_batches = 3; });  // mock evaluates random tokens
  const auto tokens = [](double fraction) {
    return [=](Config& c) {
      c.data.kind = DataKind::kTokens, c.data.path = "x.bin", c.train.eval_every = 10;
      c.data.validation_fraction = fraction;
    };
  };
  accepts(tokens(0.1));
  refuses(tokens(0), "train.eval_every = 10 needs validation data, but data.validation_fraction is 0",
          "data.validation_fraction");
}

TEST_CASE("optimizer") {
  const auto set = [](auto member, double value) { return [=](Config& c) { c.optimizer.*member = value; }; };
  using O = OptimizerConfig;
  accepts(set(&O::lr, 0));  // a run that changes nothing is a useful check
  accepts(set(&O::clip_grad, 0));
  accepts(set(&O::beta1, 0));
  refuses(set(&O::lr, -1), "optimizer.lr = -1 must be 0 or more", "optimizer.lr");
  refuses(set(&O::beta1, 1), "optimizer.beta1 = 1 must be from 0 to below 1", "optimizer.beta1");
  refuses(set(&O::beta2, -0.1), "optimizer.beta2 = -0.1 must be from 0 to below 1", "optimizer.beta2");
  refuses(set(&O::eps, 0), "optimizer.eps = 0 must be above 0", "optimizer.eps");
  refuses(set(&O::weight_decay, -1), "optimizer.weight_decay = -1 must be 0 or more", "optimizer.weight_decay");
  refuses(set(&O::clip_grad, -1), "optimizer.clip_grad = -1 must be 0 or more", "optimizer.clip_grad");
}

TEST_CASE("values are judged as the fp32 numbers that are computed with") {
  const auto set = [](auto member, double value) { return [=](Config& c) { c.optimizer.*member = value; }; };
  using O = OptimizerConfig;
  accepts(set(&O::beta1, 0.99999997));  // the float below 1 is 1 − 2^-24 = 0.99999994
  refuses(set(&O::beta1, 0.99999999),
          "optimizer.beta1 = 0.99999999 is computed with in fp32, where it becomes 1; it must be from 0 to below 1",
          "set optimizer.beta1 from 0 to below 1");
  refuses(set(&O::beta2, 0.99999999), "optimizer.beta2 = 0.99999999 is computed with in fp32", "below 1");
  accepts(set(&O::eps, 1e-45));  // the least positive float
  refuses(set(&O::eps, 1e-60), "optimizer.eps = 1e-60 is computed with in fp32, where it becomes 0; it must be above 0",
          "set optimizer.eps above 0");
  refuses([](Config& c) { c.model.rms_norm_eps = 1e-60; }, "model.rms_norm_eps = 1e-60 is computed with in fp32",
          "above 0");
  accepts(set(&O::lr, 3.4e38));
  for (const double large : {3.5e38, 1e300, static_cast<double>(INFINITY)}) {
    refuses(set(&O::lr, large), "exceeds 3.4028234663852886e+38, the largest number of fp32", "optimizer.lr");
    refuses(set(&O::weight_decay, large), ", the largest number of fp32", "optimizer.weight_decay");
    refuses(set(&O::clip_grad, large), ", the largest number of fp32", "optimizer.clip_grad");
  }
  refuses(set(&O::lr, NAN), "optimizer.lr = nan must be 0 or more", "optimizer.lr");
  // Positions of tokens and parts of the data are computed in fp64.
  accepts([](Config& c) { c.model.rope_theta = 1e39; });
  accepts([](Config& c) {
    c.data.kind = DataKind::kTokens, c.data.path = "x.bin", c.data.validation_fraction = 0.99999999;
  });
}

TEST_CASE("schedule") {
  const auto schedule = [](ScheduleKind kind, int64_t warmup, int64_t decay, int64_t wsd, double min_lr) {
    return [=](Config& c) { c.schedule = {kind, warmup, decay, wsd, min_lr}; };
  };
  constexpr auto kConstant = ScheduleKind::kConstant, kCosine = ScheduleKind::kCosine, kWsd = ScheduleKind::kWsd;
  accepts(schedule(kConstant, 10, 0, 0, 0));
  accepts(schedule(kCosine, 99, 0, 0, 3e-4));
  accepts(schedule(kCosine, 10, 500, 0, 1e-5));
  accepts(schedule(kWsd, 10, 0, 90, 1e-5));
  refuses(schedule(kConstant, 0, 50, 0, 0), "schedule.decay_steps = 50 would be ignored with schedule.kind: constant",
          "remove schedule.decay_steps");
  refuses(schedule(kConstant, 0, 0, 0, 1e-5), "schedule.min_lr = 1e-05 would be ignored with schedule.kind: constant",
          "remove schedule.min_lr");
  refuses(schedule(kCosine, 0, 0, 5, 0), "schedule.wsd_decay_steps = 5 would be ignored with schedule.kind: cosine",
          "remove schedule.wsd_decay_steps");
  refuses(schedule(kConstant, 100, 0, 0, 0), "schedule.warmup_steps = 100 must be less than train.steps = 100",
          "at most 99");
  refuses(schedule(kCosine, 20, 20, 0, 0), "schedule.decay_steps = 20 must exceed schedule.warmup_steps = 20", "auto");
  refuses(schedule(kCosine, 0, 0, 0, 1e-3), "schedule.min_lr = 0.001 exceeds optimizer.lr = 0.0003", "lower");
  refuses(schedule(kCosine, 0, 0, 0, -1), "schedule.min_lr = -1 must be 0 or more", "schedule.min_lr");
  refuses(schedule(kCosine, -1, 0, 0, 0), "schedule.warmup_steps = -1 must be 0 to", "schedule.warmup_steps");
  refuses(schedule(kCosine, 0, -1, 0, 0), "schedule.decay_steps = -1 must be 0 to", "schedule.decay_steps");
  refuses(schedule(kWsd, 0, 0, -1, 0), "schedule.wsd_decay_steps = -1 must be 0 to", "schedule.wsd_decay_steps");
  refuses(schedule(kWsd, 0, 0, 0, 0), "schedule.kind: wsd needs schedule.wsd_decay_steps", "final decay");
  refuses(schedule(kWsd, 10, 0, 91, 0), "schedule.wsd_decay_steps = 91 does not fit", "at most 90");
}

TEST_CASE("data") {
  const auto data = [](DataKind kind, const std::string& path, auto change) {
    return [=](Config& c) {
      c.data.kind = kind, c.data.path = path;
      change(c);
    };
  };
  const auto nothing = [](Config&) {};
  constexpr auto kMock = DataKind::kMock, kTokens = DataKind::kTokens, kMegatron = DataKind::kMegatron;
  accepts(data(kTokens, "x.bin", [](Config& c) { c.data.token_dtype = "uint32", c.data.validation_fraction = 0.5; }));
  accepts(data(kMegatron, "x", [](Config& c) { c.data.split = "9,1", c.train.eval_every = 5; }));
  accepts(data(kMock, "", [](Config& c) { c.data.eod_id = 249, c.data.eod_mask_loss = true; }));
  accepts(data(kMock, "", [](Config& c) { c.data.eod_id = 249, c.data.reset_at_eod = true; }));
  accepts(data(kMegatron, "x", [](Config& c) { c.data.reset_at_eod = true; }));
  refuses(data(kMock, "", [](Config& c) { c.data.eod_id = 249; }),
          "data.eod_id = 249 would be ignored with data.eod_mask_loss: false and data.reset_at_eod: false",
          "remove data.eod_id");
  refuses(data(kMock, "", [](Config& c) { c.data.validation_fraction = 0.5; }),
          "data.validation_fraction = 0.5 would be ignored with data.kind: mock", "remove data.validation_fraction");
  accepts(data(kMock, "", [](Config& c) { c.data.mock_vocab_size = c.model.vocab_size; }));
  refuses(data(kTokens, "x.bin", [](Config& c) { c.data.mock_vocab_size = 5; }),
          "data.mock_vocab_size = 5 would be ignored with data.kind: tokens", "remove data.mock_vocab_size");
  for (const int64_t tokens : {int64_t{-1}, int64_t{1} << 40}) {
    refuses(data(kMock, "", [tokens](Config& c) { c.data.mock_vocab_size = tokens; }),
            format("data.mock_vocab_size = {} must be from 1 to model.vocab_size", tokens),
            "0 for the whole vocabulary");
  }
  refuses(data(kTokens, "", nothing), "data.kind: tokens needs data.path or data.blend", "tools/tokenise");
  refuses(data(kMegatron, "", nothing), "data.kind: megatron needs data.path or data.blend", "without the ending");
  refuses(data(kMock, "x.bin", nothing), "data.path = x.bin would be ignored with data.kind: mock", "remove data.path");
  const auto blend = [](DataKind kind, const std::string& text) {
    return [=](Config& c) { c.data.kind = kind, c.data.blend = parse_blend(text); };
  };
  accepts(blend(kTokens, "0.7 a 0.3 b"));
  accepts(blend(kMegatron, "a b"));
  accepts(data(kMegatron, "x", [](Config& c) { c.data.cache_dir = "cache"; }));
  refuses(blend(kMock, "a b"), "data.blend = \"a b\" would be ignored with data.kind: mock", "remove data.blend");
  refuses(data(kTokens, "x", [](Config& c) { c.data.blend = parse_blend("a b"); }),
          "data.path = x would be ignored with data.blend", "remove data.path");
  refuses(data(kTokens, "x", [](Config& c) { c.data.cache_dir = "cache"; }),
          "data.cache_dir = cache would be ignored with data.kind: tokens", "remove data.cache_dir");
  refuses(data(kMock, "", [](Config& c) { c.data.cache_dir = "cache"; }),
          "data.cache_dir = cache would be ignored with data.kind: mock", "remove data.cache_dir");
  require_error(ErrorKind::kConfig, {"c.yaml:3: data.blend = \"1 a b\": some paths have no weight"}, [] {
    validate(load_text("model: {preset: qwen3-0.6b}\ntrain: {steps: 1, sequence_length: 8}\n"
                       "data: {kind: tokens, blend: \"1 a b\"}\n"),
             1);
  });
  refuses(data(kMock, "", [](Config& c) { c.data.token_dtype = "uint16"; }),
          "data.token_dtype = uint16 would be ignored with data.kind: mock", "remove data.token_dtype");
  refuses(data(kMegatron, "x", [](Config& c) { c.data.token_dtype = "uint16"; }),
          "data.token_dtype = uint16 would be ignored with data.kind: megatron", "remove");
  refuses(data(kTokens, "x", [](Config& c) { c.data.token_dtype = "int32"; }),
          "data.token_dtype must be uint16 or uint32, not int32", "written with");
  refuses(data(kTokens, "x", [](Config& c) { c.data.split = "1,1,1"; }),
          "data.split = \"1,1,1\" would be ignored with data.kind: tokens", "remove data.split");
  refuses(data(kMegatron, "x", [](Config& c) { c.data.validation_fraction = 0.1; }),
          "data.validation_fraction = 0.1 would be ignored with data.kind: megatron", "remove");
  refuses(data(kTokens, "x", [](Config& c) { c.data.validation_fraction = 1; }),
          "data.validation_fraction = 1 must be from 0 to below 1", "data.validation_fraction");
  refuses(data(kMock, "", [](Config& c) { c.data.eod_id = 250; }),
          "data.eod_id = 250 is not a token of model.vocab_size = 250", "use 0 to 249");
  refuses(data(kMock, "", [](Config& c) { c.data.eod_id = -2; }), "data.eod_id = -2 is not a token", "auto");
  refuses(data(kMegatron, "x", [](Config& c) { c.data.split = "100", c.train.eval_every = 5; }),
          "train.eval_every = 5 needs validation data, but data.split = \"100\" keeps none", "second weight");
  const auto split = [&](const char* text) {
    return data(kMegatron, "x", [text](Config& c) { c.data.split = text, c.train.eval_every = 5; });
  };
  accepts(split("90 10"));
  accepts(split("1,,2"));
  refuses(split("90"), "train.eval_every = 5 needs validation data", "second weight");
  refuses(split("9e1,10"), "data.split = \"9e1,10\": only numbers", "969, 30, 1");
  refuses(split("0, 1"), "data.split = \"0, 1\" leaves nothing to train on", "first weight");
  require_error(ErrorKind::kConfig, {"c.yaml:3: data.split = \"1;2\": only numbers"}, [] {
    validate(load_text("model: {preset: qwen3-0.6b}\ntrain: {steps: 9, sequence_length: 8}\n"
                       "data: {kind: megatron, path: x, split: \"1;2\"}\n"),
             1);
  });
}

TEST_CASE("output") {
  accepts([](Config& c) { c.checkpoint.dir = "x", c.checkpoint.resume = "never", c.checkpoint.export_dir = "y"; });
  accepts([](Config& c) { c.checkpoint.every = 10, c.log.dir = "x"; });
  accepts([](Config& c) { c.checkpoint.dir = "x", c.checkpoint.keep = 3, c.checkpoint.keep_every = 100; });
  accepts([](Config& c) { c.checkpoint.resume = "runs/x"; });
  accepts([](Config& c) { c.checkpoint.dir = "x", c.train.exit_after_steps = 5, c.train.exit_after_minutes = 0.5; });
  refuses([](Config& c) { c.checkpoint.every = 10; }, "checkpoint.every = 10 has no folder to save to",
          "checkpoint.dir");
  refuses([](Config& c) { c.checkpoint.every = -1; }, "checkpoint.every = -1 must be 0 to", "checkpoint.every");
  refuses([](Config& c) { c.checkpoint.keep = 0; }, "checkpoint.keep = 0 must be 1 to", "checkpoint.keep");
  refuses([](Config& c) { c.checkpoint.keep_every = -1; }, "checkpoint.keep_every = -1 must be 0 to",
          "checkpoint.keep_every");
  refuses([](Config& c) { c.checkpoint.keep = 5; }, "checkpoint.keep = 5 would be ignored as no checkpoints are saved",
          "remove checkpoint.keep");
  refuses([](Config& c) { c.checkpoint.async = false; }, "checkpoint.async = false would be ignored", "remove");
  refuses([](Config& c) { c.checkpoint.on_error = SaveFailurePolicy::kStop; },
          "checkpoint.on_error = stop would be ignored", "remove");
  refuses([](Config& c) { c.checkpoint.resume = ""; }, "checkpoint.resume is empty", "auto, never");
  refuses([](Config& c) { c.train.exit_after_steps = 5; }, "train.exit_after_steps needs a folder", "checkpoint.dir");
  refuses([](Config& c) { c.train.exit_after_minutes = 5; }, "train.exit_after_minutes needs a folder",
          "checkpoint.dir");
  refuses([](Config& c) { c.train.exit_after_minutes = -1; }, "train.exit_after_minutes = -1", "train.exit_after");
  refuses([](Config& c) { c.train.exit_after_steps = -1; }, "train.exit_after_steps = -1 must be 0 to",
          "train.exit_after");
  refuses([](Config& c) { c.train.spike_zscore = -1; }, "train.spike_zscore = -1", "train.spike_zscore");
  refuses([](Config& c) { c.log.every = 0; }, "log.every = 0 must be 1 to", "log.every");
  const auto dump = [](int64_t step, const char* dir) {
    return [=](Config& c) { c.log.dump_step = step, c.log.dir = dir; };
  };
  accepts(dump(1, "x"));
  accepts(dump(100, "x"));
  accepts(dump(0, ""));
  refuses(dump(-1, "x"), "log.dump_step = -1 must be 0 to", "log.dump_step");
  refuses(dump(101, "x"), "log.dump_step = 101 is beyond train.steps = 100", "use 1 to 100, or 0");
  refuses(dump(5, ""), "log.dump_step = 5 needs log.dir", "set log.dir");
  accepts([](Config& c) { c.log.profile_step = 100; });
  refuses([](Config& c) { c.log.profile_step = 101; }, "log.profile_step = 101 is beyond train.steps = 100",
          "use 1 to 100, or 0");
  refuses([](Config& c) { c.log.hash_every = -1; }, "log.hash_every = -1 must be 0 to", "log.hash_every");
  refuses([](Config& c) { c.log.hash_every = 5; }, "log.hash_every = 5 needs log.dir", "set log.dir");
  refuses([](Config& c) { c.log.hash_blocks = true; }, "log.hash_blocks = true would be ignored with log.hash_every: 0",
          "remove log.hash_blocks");
}

TEST_CASE("collectives of GPUs") {
  const auto timeout = [](double seconds) {
    return [=](Config& c) { c.device = DeviceChoice::kCuda, c.comm.timeout = seconds; };
  };
  for (const double seconds : {1.0, 600.0, 1e6}) accepts(timeout(seconds));
  for (const double seconds : {0.0, 0.5, -1.0, 1e6 + 1, 1e300, std::nan("")}) {
    refuses(timeout(seconds), "comm.timeout = ", "600");
  }
  refuses([](Config& c) { c.device = DeviceChoice::kCpu, c.comm.synchronous = true; }, "comm.synchronous = true",
          "remove");
  refuses([](Config& c) { c.device = DeviceChoice::kCpu, c.comm.share_gpus = true; }, "comm.share_gpus = true",
          "remove");
}

TEST_CASE("a gradient bucket has elements") {
  accepts([](Config& c) { c.parallel.bucket_size = 1; });
  refuses([](Config& c) { c.parallel.bucket_size = 0; }, "parallel.bucket_size = 0 must be 1 to",
          "parallel.bucket_size");
}

TEST_CASE("automatic values") {
  Config config = valid_config();
  config.parallel.tensor = 2;
  config.train.micro_batch_size = 3;
  CHECK(replica_degree(config, 8) == 4);
  CHECK(global_batch_size(config, 8) == 12);
  CHECK(decay_steps(config) == 100);
  config.parallel.data = 2;
  config.train.global_batch_size = 24;
  config.schedule.decay_steps = 50;
  CHECK(replica_degree(config, 4) == 2);
  CHECK(global_batch_size(config, 4) == 24);
  CHECK(decay_steps(config) == 50);
}
