#include "config/config_changes.h"

#include "config/key_table.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

Config some_config() {
  Config config;
  config.model.hidden_size = 64;
  config.train.steps = 100;
  config.origin["model.hidden_size"] = "run.yaml:3";
  return config;
}

}  // namespace

TEST_CASE("An equal config has no changes") {
  CHECK(config_changes(some_config(), some_config()).empty());
}

TEST_CASE("A change of the recipe is returned with both values") {
  Config now = some_config();
  now.optimizer.lr = 1e-3;
  now.schedule.decay_steps = 50;
  now.data.path = "other.bin";
  const std::vector<ConfigChange> changes = config_changes(some_config(), now);
  REQUIRE(changes.size() == 3);
  CHECK(changes[0].key == "optimizer.lr");
  CHECK(changes[0].before == "0.0003");
  CHECK(changes[0].after == "0.001");
  CHECK(changes[1].key == "schedule.decay_steps");
  CHECK(changes[1].before == "auto");
  CHECK(changes[2].after == "other.bin");
}

TEST_CASE("Layout, folders and the way to the model are nobody's business") {
  Config now = some_config();
  now.parallel.tensor = 4;
  now.train.micro_batch_size = 4;
  now.train.recompute = RecomputeKind::kFull;
  now.model.preset = "qwen3-0.6b";
  now.model.hf_path = "x";
  now.checkpoint.every = 5;
  now.log.dir = "runs/y";
  CHECK(config_changes(some_config(), now).empty());
}

TEST_CASE("A change of the model or of the numerics is refused where it was written") {
  Config now = some_config();
  now.model.hidden_size = 128;
  require_error(ErrorKind::kConfig, {"run.yaml:3", "model.hidden_size is 128", "saved with 64"},
                [&] { config_changes(some_config(), now); });
  now = some_config();
  now.numerics.precision = Precision::kF32;
  require_error(ErrorKind::kConfig, {"numerics.precision is fp32", "bf16"},
                [&] { config_changes(some_config(), now); });
}

TEST_CASE("Other reductions may be gone on with; what they are made of is the contract's business") {
  Config now = some_config();
  now.numerics.reduction = Reduction::kInvariant;
  now.numerics.leaves = 16;
  now.numerics.workers = 2;
  const std::vector<ConfigChange> changes = config_changes(some_config(), now);
  REQUIRE(changes.size() == 1);
  CHECK(changes[0].key == "numerics.reduction");
  CHECK(changes[0].before == "fast");
  CHECK(changes[0].after == "invariant");
}

TEST_CASE("Rounded terms of tensor ranks and other mock tokens are another recipe") {
  Config now = some_config();
  now.numerics.tensor_reduce_dtype = Precision::kBF16;
  now.data.mock_vocab_size = 7;
  const std::vector<ConfigChange> changes = config_changes(some_config(), now);
  REQUIRE(changes.size() == 2);
  CHECK(changes[0].key == "numerics.tensor_reduce_dtype");
  CHECK(changes[0].after == "bf16");
  CHECK(changes[1].key == "data.mock_vocab_size");
}

TEST_CASE("Another contract is refused with the field, both values and the way back") {
  const auto text = [](const std::string& arithmetic, int leaves, int token_block) {
    return format("version 1\narithmetic {}\nleaves {}\ntoken_block {}\n", arithmetic, leaves, token_block);
  };
  const Config saved = [] {
    Config config = some_config();
    config.train.sequence_length = 512;
    return config;
  }();
  Config now = some_config();
  now.origin["numerics.leaves"] = "run.yaml:7";
  const std::string before = text("fma-chain", 8, 8);
  CHECK_NOTHROW(check_contract(saved, before, now, before));
  CHECK_NOTHROW(check_contract(saved, "", now, before));
  CHECK_NOTHROW(check_contract(saved, before, now, ""));
  CHECK_NOTHROW(check_contract(saved, "", now, ""));
  const auto refused = [&](const std::string& after, const std::string& message, const std::string& hint) {
    require_error(ErrorKind::kConfig, {message}, {hint + ", or start from the weights alone: invar export"},
                  [&] { check_contract(saved, before, now, after); });
  };
  refused(text("fma-chain", 4, 8),
          "run.yaml:7: leaves of the numerics contract is 4, but the checkpoint was saved with 8",
          "set numerics.leaves: 8");
  refused(text("fma-chain", 8, 16), "token_block of the numerics contract is 16, but the checkpoint was saved with 8",
          "set train.sequence_length: 512");
  refused(text("mma-k16-sm90", 8, 8), "arithmetic of the numerics contract is mma-k16-sm90",
          "run on devices whose matrix products are fma-chain");
  const std::string rounded = before + "tensor_reduce_dtype bf16\n";
  refused(rounded, "tensor_reduce_dtype of the numerics contract is bf16, but the checkpoint was saved with fp32",
          "set numerics.tensor_reduce_dtype: fp32");
  require_error(ErrorKind::kConfig, {"tensor_reduce_dtype of the numerics contract is fp32", "saved with bf16"},
                {"set numerics.tensor_reduce_dtype: bf16"}, [&] { check_contract(saved, rounded, now, before); });
  const auto other_attention = [&](const Config& config, const std::string& hint) {
    require_error(ErrorKind::kConfig, {"attention of the numerics contract is own", "saved with cudnn-9.19.0"}, {hint},
                  [&] { check_contract(saved, "attention cudnn-9.19.0\n", config, "attention own\n"); });
  };
  other_attention(saved, "run on devices whose attention is cudnn-9.19.0");
  Config apart = saved;
  apart.data.reset_at_eod = !saved.data.reset_at_eod;
  other_attention(apart, format("set data.reset_at_eod: {}", saved.data.reset_at_eod));
  apart.train.sequence_length = 2 * saved.train.sequence_length;
  other_attention(apart, format("set train.sequence_length: {}", saved.train.sequence_length));
  refused("version 2\n", "version of the numerics contract is 2", "use the invar that saved it");
}

TEST_CASE("A portable config stands without its preset") {
  const Config config =
      load_text("model: {preset: qwen3-0.6b, rms_norm_eps: 1e-5}\ntrain: {steps: 9, sequence_length: 8}\n");
  const Config portable = load_config_text(to_portable_yaml(config), "saved");
  CHECK(portable.model.preset.empty());
  CHECK(portable.model.hidden_size == config.model.hidden_size);
  CHECK(portable.model.rms_norm_eps == 1e-5);
  CHECK(config_changes(portable, config).empty());
  require_error(ErrorKind::kConfig, {"saved:1"}, [] { load_config_text("bogus: 3\n", "saved"); });
}
