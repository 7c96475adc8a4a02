#include "app/compare_hashes.h"

#include "app/compare_report.h"
#include "observe/metrics.h"
#include "ops/block_hashes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"
#include "train/step_hash.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

using Shape = std::vector<int64_t>;

// Two matrices of three and two blocks, the same in every kind but for element `changed` of exp_avg's second.
StateHash made_up_state(int64_t step, int64_t changed = -1) {
  StateHash hash;
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    for (const auto& [name, rows] : {std::pair("z.first", 100), std::pair("a.second", 50)}) {
      std::vector<float> values(static_cast<size_t>(rows * 100));
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>(i * (kind + 1)) + static_cast<float>(step);
      if (kind == 1 && rows == 50 && changed >= 0) values[static_cast<size_t>(changed)] += 1;
      std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(std::ssize(values))));
      const ops::HashedRows all{{0, rows}, {0, 100, 100, 0}};
      ops::add_block_hashes(Stream(DeviceType::kCpu), view_of(values).view({rows, 100}), {&all, 1}, view_of(blocks));
      hash.tensors[kind].push_back({name, {rows, 100}, blocks});
    }
  }
  return hash;
}

// A run that hashed its steps; where `changed_at` is one, element `changed` differs there.
struct Run {
  TemporaryFolder folder;

  void write(int64_t step, const StateHash& hash, double loss = 1) const {
    StepMetrics metrics;
    metrics.step = step;
    metrics.loss = loss;
    metrics.state_hash = hash.digest(loss, 1);
    MetricsWriter(folder.path()).write(metrics);
    StateHashWriter(folder.path()).write(step, hash);
  }
  void write_steps(int64_t changed_at = 0, int64_t changed = 0) const {
    for (int64_t step = 1; step <= 3; ++step) {
      const StateHash hash = made_up_state(step, step == changed_at ? changed : -1);
      write(step, hash);
      write_block_hashes(folder.path(), step, hash);
    }
  }
  std::filesystem::path metrics() const { return folder / "metrics.jsonl"; }
};

std::string report(const HashDifference& difference) {
  std::string text;
  for (const std::string& line : describe(difference)) text += line + "\n";
  return text;
}

HashDifference compare(const Run& a, const Run& b) {
  const std::optional<HashDifference> found = compare_hashes(a.metrics(), b.metrics());
  REQUIRE(found.has_value());
  return *found;
}

}  // namespace

TEST_CASE("Equal states are told by their number") {
  const Run a, b;
  a.write_steps();
  b.write_steps();
  CHECK(compare(a, b).all_equal());
  CHECK(report(compare(a, b)) == "state: 3 steps with equal state\n");
}

TEST_CASE("The first step, tensor and block that differ are named") {
  const Run a, b;
  a.write_steps();
  b.write_steps(2, 4096 + 7);
  const HashDifference found = compare(a, b);
  CHECK_FALSE(found.all_equal());
  CHECK(found.steps == 3);
  CHECK(found.equal == 2);
  CHECK(found.first_differing == 2);
  REQUIRE(found.kinds.size() == 1);
  CHECK(found.kinds[0].first == "a.second");
  CHECK(found.kinds[0].block == 1);
  CHECK(report(found) ==
        "state: equal at 2 of 3 hashed steps, first differing at step 2\n"
        "  exp_avg: 1 tensor, first a.second, block 1 (elements 4096 to 4999 of (50, 100))\n");
}

TEST_CASE("Without the hashes of blocks, or with those of another run, the tensor is named") {
  const Run a, b;
  a.write_steps();
  b.write_steps(2, 7);
  SECTION("another run's") {
    write_block_hashes(b.folder.path(), 2, made_up_state(2, 4096));
    CHECK_FALSE(compare(a, b).kinds.at(0).block.has_value());
  }
  SECTION("none") {
    std::filesystem::remove(block_hashes_path(a.folder.path(), 2));
    CHECK_FALSE(compare(a, b).kinds.at(0).block.has_value());
    CHECK(contains(report(compare(a, b)), "  exp_avg: 1 tensor, first a.second\n"));
  }
  SECTION("nor those of tensors") {
    std::filesystem::remove(a.folder / "state_hashes.jsonl");
    CHECK(contains(report(compare(a, b)), "  exp_avg: no hashes of its tensors in both runs\n"));
  }
}

TEST_CASE("The first tensor is the first of the model, and one that a run lacks differs") {
  const Run a, b;
  a.write(1, made_up_state(1));
  b.write(1, made_up_state(2));
  CHECK(compare(a, b).kinds.size() == 4);
  CHECK(compare(a, b).kinds[0].first == "z.first");
  CHECK(compare(a, b).kinds[0].tensors == 2);
  StateHash less = made_up_state(1);
  less.of(StateKind::kWeights).erase(less.of(StateKind::kWeights).begin());
  const Run c;
  c.write(1, less);
  CHECK(compare(a, c).kinds.at(0).first == "z.first");
  CHECK(compare(c, a).kinds.at(0).first == "z.first");
}

TEST_CASE("Of two lines for a step the later one counts") {
  const Run a, b;
  a.write_steps();
  b.write_steps(3, 7);
  b.write(3, made_up_state(3));
  CHECK(compare(a, b).all_equal());
  b.write(2, made_up_state(2, 3));
  CHECK(compare(a, b).first_differing == 2);
  CHECK(compare(a, b).kinds.at(0).first == "a.second");
}

TEST_CASE("A loss of other bits differs, and runs without common hashes have none to compare") {
  const Run a, b, none;
  a.write(1, made_up_state(1));
  b.write(1, made_up_state(1), 1.5);
  CHECK(compare(a, b).kinds.empty());
  CHECK(compare(a, b).first_differing == 1);
  CHECK(contains(report(compare(a, b)), "loss or gradient norm alone"));
  MetricsWriter(none.folder.path()).write(StepMetrics{});
  CHECK_FALSE(compare_hashes(a.metrics(), none.metrics()).has_value());
}

TEST_CASE("Hashes without a step in common prove nothing") {
  const Run a, b;
  a.write(1, made_up_state(1));
  b.write(2, made_up_state(2));
  CHECK(compare(a, b).steps == 0);
  CHECK_FALSE(compare(a, b).all_equal());
  CHECK(contains(report(compare(a, b)), "no step with hashes in common"));
}

TEST_CASE("Blocks that do not fit their tensor's shape are refused") {
  const Run a, b;
  a.write_steps();
  b.write_steps(2, 4999);
  const StateHash hash = made_up_state(2);
  for (const Shape& shape : {Shape{50, 1000}, Shape{-50, -100}, Shape{int64_t{1} << 62, 4}}) {
    StateHash damaged = hash;
    for (auto& kind : damaged.tensors) {
      for (auto& tensor : kind) tensor.shape = shape;
    }
    write_block_hashes(a.folder.path(), 2, damaged);
    require_error(ErrorKind::kData, {"block", "do not fit its shape"}, [&] { compare(a, b); });
  }
}

TEST_CASE("State hashes that are no hashes are refused by file and line") {
  const Run a, b;
  a.write(1, made_up_state(1));
  b.write(1, made_up_state(1, 7));
  const std::string name = StateHashWriter::kStateHashesFile;
  a.folder.write(name, "{\"step\":1,\"exp_avg\":{\"z.first\":" + std::string(100000, '[') + "\n");
  require_error(ErrorKind::kData, {name + ":1: more than 64 levels deep"}, [&] { compare(a, b); });
  a.folder.write(name, "{\"step\":1,\"exp_avg\":{\"z.first\":7}}\n");
  require_error(ErrorKind::kData, {name + ":1: exp_avg.z.first"}, [&] { compare(a, b); });
}
