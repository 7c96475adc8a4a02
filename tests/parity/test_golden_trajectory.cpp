// The bits of small invariant runs on CPUs, kept here beside the version of the contract that promises them. They are
// those of every x86-64 host with AVX2 and FMA: a multiply-add is fused where the source
// says so, and no value comes from a math library.
#include "config/field.h"
#include "invariant_models.h"
#include "observe/state_hash.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int kVersion = 2;  // of the contract, whose hashes follow

struct Golden {
  const char* name;
  Config (*make)(Precision);
  Precision precision;
  Precision leaf;    // numerics.tensor_reduce_dtype
  const char* hash;  // of the state after the last step
};
constexpr Precision kF32 = Precision::kF32;
constexpr Precision kBF16 = Precision::kBF16;
const std::vector<Golden> kGolden = {
    {"Qwen3", tied_qwen3, kF32, kF32, "b00e3006b8506d2b"},
    {"Qwen3", tied_qwen3, kBF16, kF32, "40d5756ee12202df"},
    {"Qwen3, rounded leaves", tied_qwen3, kBF16, kBF16, "2f48cd1b76099feb"},
    {"Qwen3, two KV heads", grouped_qwen3, kF32, kF32, "aa28faf0a91e4b15"},
    {"Qwen3, two KV heads", grouped_qwen3, kBF16, kF32, "99781099b1bb297e"},
    {"Gemma 4, per-layer embeddings", gemma4_e_series, kF32, kF32, "bc9e7e4f1703ccf2"},
    {"Gemma 4, per-layer embeddings", gemma4_e_series, kBF16, kF32, "5a17360c8fa1a735"},
    {"Gemma 4, dense", gemma4_dense, kF32, kF32, "a8de1cb686bed2dd"},
    {"Gemma 4, dense", gemma4_dense, kBF16, kF32, "906883e25add2aa8"},
};

std::string hash_of(const Golden& golden) {
  Config config = golden.make(golden.precision);
  config.numerics.tensor_reduce_dtype = golden.leaf;
  config.train.steps = 4;
  config.train.sequence_length = 128;  // blocks of two tokens
  config.train.global_batch_size = 3;
  config.numerics.workers = 2;
  config.schedule.kind = ScheduleKind::kCosine;
  config.schedule.warmup_steps = 1;
  config.optimizer.weight_decay = 0.1;
  const HashedRun run = train_hashed(config, {});
  CHECK(run.steps.back().digest.kinds[0] != run.steps.front().digest.kinds[0]);
  return hash_text(run.steps.back().digest.combined);
}

}  // namespace

TEST_CASE("the bits of a trajectory are those of the contract's version") {
  {
    INFO("another version of NumericsContract: write it and its hashes here");
    REQUIRE(NumericsContract{}.version == kVersion);
  }
  for (const Golden& golden : kGolden) {
    const std::string hash = hash_of(golden);
    INFO(
        golden.name << ", " << word_of(golden.precision)
                    << ": the bits of invariant numerics have changed; if they were meant to, raise NumericsContract's "
                       "version (lib/config/contract.h) and write it and the new hashes here");
    CHECK(hash == golden.hash);
  }
}
