#include "config/contract.h"

#include "config/presets.h"
#include "config/units.h"
#include "core/format.h"
#include "core/philox.h"
#include "support/catch.h"

using namespace invar;

namespace {

Config config_of(const char* preset, int64_t sequence_length) {
  Config config;
  config.model = preset_model(preset);
  config.train.sequence_length = sequence_length;
  config.numerics.reduction = Reduction::kInvariant;
  return config;
}

// "name units of parts", joined.
std::string sites_text(const char* preset) {
  std::string text;
  for (const SumSite& site : sum_sites(preset_model(preset))) {
    const std::string parts = site.parts > 1 ? format(" of {}", site.parts) : "";
    text += format("{} {}{}{}; ", site.name, site.units, parts, site.may_be_uneven ? " any" : "");
  }
  return text;
}

void check_difference(const NumericsContract& saved, const NumericsContract& now, const std::string& field,
                      const std::string& was, const std::string& is) {
  const auto difference = first_difference(saved.text(), now.text());
  REQUIRE(difference);
  CHECK(difference->field == field);
  CHECK(difference->saved == was);
  CHECK(difference->now == is);
}

}  // namespace

TEST_CASE("the text of a contract names every constant") {
  Config config = config_of("qwen3-0.6b", 4096);
  config.numerics.workers = 16;
  const NumericsContract contract = numerics_contract(config, "mma-k16-sm90");
  const std::string text =
      "version 2\nprecision bf16\narithmetic mma-k16-sm90\nleaves 8\nworkers 16\ntoken_block 64\n"
      "head_chunk_tokens 2048\n";
  CHECK(contract.text() == text);
  CHECK(contract.hash() == format("{:016x}", hash_name(text)));
  CHECK(contract.hash().size() == 16);
  CHECK(contract == numerics_contract(config, "mma-k16-sm90"));
  CHECK(contract.describe() == contract.hash() +
                                   ": version 2, precision bf16, arithmetic mma-k16-sm90, leaves 8, workers 16, "
                                   "token_block 64, head_chunk_tokens 2048");
}

TEST_CASE("a contract names the runs of query heads where a KV head has several") {
  const auto runs = [](const char* preset, int64_t leaves) {
    Config config = config_of(preset, 4096);
    config.numerics.leaves = leaves;
    const NumericsContract contract = numerics_contract(config, "fma-chain");
    const std::string line = format("head_runs {}\n", contract.head_runs);
    CHECK(contract.text().ends_with(line) == (contract.head_runs > 1));
    CHECK((contract.text().find("head_runs") != std::string::npos) == (contract.head_runs > 1));
    return contract.head_runs;
  };
  CHECK(runs("qwen3-0.6b", 8) == 1);
  CHECK(runs("qwen3-0.6b", 16) == 2);
  CHECK(runs("gemma4-e2b", 1) == 1);
  CHECK(runs("gemma4-e2b", 8) == 8);
  CHECK(runs("gemma4-31b", 4) == 1);
  CHECK(runs("gemma4-31b", 8) == 2);  // of the four KV heads of full layers
}

TEST_CASE("a contract names what leaves are rounded to") {
  Config config = config_of("qwen3-0.6b", 4096);
  const NumericsContract exact = numerics_contract(config, "fma-chain");
  config.numerics.tensor_reduce_dtype = Precision::kBF16;
  const NumericsContract rounded = numerics_contract(config, "fma-chain");
  CHECK(rounded.text() == exact.text() + "tensor_reduce_dtype bf16\n");
  CHECK(rounded.hash() != exact.hash());
  check_difference(rounded, exact, "tensor_reduce_dtype", "bf16", "none");
}

TEST_CASE("a contract on GPUs names whose attention it is") {
  const Config config = config_of("qwen3-0.6b", 4096);
  const NumericsContract contract = numerics_contract(config, "mma-k16-sm90", "cudnn-9.19.0");
  CHECK(contract.text() ==
        "version 2\nprecision bf16\narithmetic mma-k16-sm90\nattention cudnn-9.19.0\nleaves 8\nworkers 8\n"
        "token_block 64\nhead_chunk_tokens 2048\n");
  const NumericsContract other = numerics_contract(config, "mma-k16-sm90", "cudnn-9.20.0");
  CHECK(other != contract);
  CHECK(other.hash() != contract.hash());
  check_difference(contract, other, "attention", "cudnn-9.19.0", "cudnn-9.20.0");
}

TEST_CASE("only tensor cores have another arithmetic") {
  CHECK(arithmetic_of(Precision::kBF16, "") == "fma-chain");
  CHECK(arithmetic_of(Precision::kF32, "") == "fma-chain");
  CHECK(arithmetic_of(Precision::kF32, "sm90") == "fma-chain-sm90");
  CHECK(arithmetic_of(Precision::kBF16, "sm90") == "mma-k16-sm90");
}

TEST_CASE("a contract does not depend on the layout") {
  Config config = config_of("qwen3-0.6b", 4096);
  const NumericsContract contract = numerics_contract(config, "fma-chain");
  config.parallel = {.tensor = 4, .sequence = true, .data = 2, .uneven = true, .bucket_size = 7};
  config.train.micro_batch_size = 3;
  config.train.recompute = RecomputeKind::kFull;
  CHECK(numerics_contract(config, "fma-chain") == contract);
}

TEST_CASE("the first difference of two contracts is named with both values") {
  const Config config = config_of("qwen3-0.6b", 4096);
  const NumericsContract contract = numerics_contract(config, "fma-chain");
  CHECK_FALSE(first_difference(contract.text(), contract.text()));

  const auto differs = [&](auto change, const std::string& field, const std::string& saved, const std::string& now) {
    NumericsContract other = contract;
    change(other);
    INFO(field);
    const auto difference = first_difference(contract.text(), other.text());
    REQUIRE(difference);
    CHECK(difference->field == field);
    CHECK(difference->saved == saved);
    CHECK(difference->now == now);
    CHECK(other.hash() != contract.hash());
    CHECK(other != contract);
  };
  differs([](NumericsContract& c) { c.version = 3; }, "version", "2", "3");
  differs([](NumericsContract& c) { c.precision = Precision::kF32; }, "precision", "bf16", "fp32");
  differs([](NumericsContract& c) { c.arithmetic = "mma-k16-sm90"; }, "arithmetic", "fma-chain", "mma-k16-sm90");
  differs([](NumericsContract& c) { c.leaves = 16, c.workers = 4; }, "leaves", "8", "16");
  differs([](NumericsContract& c) { c.workers = 16; }, "workers", "8", "16");
  differs([](NumericsContract& c) { c.token_block = 32; }, "token_block", "64", "32");
  differs([](NumericsContract& c) { c.head_chunk_tokens = 1024; }, "head_chunk_tokens", "2048", "1024");
  differs([](NumericsContract& c) { c.head_runs = 2; }, "head_runs", "none", "2");

  // Of another version: a field too many, at either side.
  const auto more = first_difference(contract.text() + "new 3\n", contract.text());
  REQUIRE(more);
  CHECK(more->field == "new");
  CHECK(more->saved == "3");
  CHECK(more->now == "none");
  const auto fewer = first_difference(contract.text(), contract.text() + "new 3\n");
  REQUIRE(fewer);
  CHECK(fewer->saved == "none");
  CHECK(fewer->now == "3");
  const auto nothing = first_difference("", contract.text());
  REQUIRE(nothing);
  CHECK(nothing->field == "version");
  CHECK(nothing->saved == "none");
}

TEST_CASE("a sequence has at most 64 token blocks") {
  CHECK(token_block_of(1) == 1);
  CHECK(token_block_of(64) == 1);
  CHECK(token_block_of(65) == 2);
  CHECK(token_block_of(128) == 2);
  CHECK(token_block_of(4096) == 64);
}

TEST_CASE("the logits of a chunk of tokens stay below a limit") {
  CHECK(head_chunk_tokens_of(1000, 250) == 1000);
  // 151936 rows are padded to themselves: 2208 tokens at most.
  CHECK(head_chunk_tokens_of(2208, 151936) == 2208);
  CHECK(head_chunk_tokens_of(2209, 151936) == 47);  // 47 · 47
  CHECK(head_chunk_tokens_of(4096, 151936) == 2048);
  CHECK(head_chunk_tokens_of(6000, 151936) == 2000);
  CHECK(head_chunk_tokens_of(4099, 151936) == 1);  // a prime
  CHECK(head_chunk_tokens_of(16, int64_t{1} << 40) == 1);
  for (const int64_t sequence : {96, 1536, 4096, 32768}) {
    const int64_t tokens = head_chunk_tokens_of(sequence, 262144);
    CHECK(sequence % tokens == 0);
    CHECK(tokens * padded_vocab_size(262144) <= kHeadChunkElements);
  }
}

TEST_CASE("the sites of a model are what tensor parallelism cuts") {
  CHECK(sites_text("qwen3-0.6b") == "key and value heads 8 of 2; FFN blocks 96; vocabulary units 9496 any; ");
  // 12288 wide sharing layers beside 6144 wide ones; 256 columns of per-layer inputs in blocks of 32.
  CHECK(sites_text("gemma4-e2b") ==
        "key and value heads 1 of 8; FFN blocks 192; FFN blocks of sharing layers 384; "
        "blocks of the per-layer inputs 8; vocabulary units 16384 any; ");
  CHECK(sites_text("gemma4-31b") ==
        "key and value heads 16 of 2; key and value heads of full layers 4 of 8; FFN blocks 672; vocabulary units "
        "16384 any; ");
}

TEST_CASE("data ranks begin where workers do") {
  // 8 workers of one sample each.
  for (const int64_t data : {1, 2, 4, 8}) CHECK(begins_with_workers(data, 8, 8));
  // 2 samples each: 16 ranks of one sample begin within workers.
  CHECK(begins_with_workers(8, 8, 16));
  CHECK_FALSE(begins_with_workers(16, 8, 16));
  // 12 samples: workers begin at 0, 1, 3, 4, 6, 7, 9, 10.
  CHECK(begins_with_workers(4, 8, 12));
  CHECK(begins_with_workers(2, 8, 12));
  CHECK_FALSE(begins_with_workers(3, 8, 24));  // at 8 and 16; workers begin at multiples of 3
  CHECK_FALSE(begins_with_workers(6, 8, 12));  // at 2
}

TEST_CASE("the workers of data ranks") {
  CHECK(workers_of(0, 1, 8, 12) == Range{0, 8});
  for (int64_t rank = 0; rank < 4; ++rank) CHECK(workers_of(rank, 4, 8, 12) == Range{2 * rank, 2 * rank + 2});
  // 5 workers of 7 samples begin at 0, 1, 2, 4, 5.
  CHECK(workers_of(3, 7, 5, 7) == Range{3, 3});
  CHECK(workers_of(4, 7, 5, 7) == Range{3, 4});
  // More leaves to some ranks than to others: 3 workers of 4 samples begin at 0, 1, 2.
  CHECK(workers_of(0, 2, 3, 4) == Range{0, 2});
  CHECK(workers_of(1, 2, 3, 4) == Range{2, 3});
  CHECK(begins_with_workers(2, 3, 4));
}
