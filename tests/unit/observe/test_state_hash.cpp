#include "observe/state_hash.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "ops/block_hashes.h"
#include "parallel/parameter.h"
#include "support/catch.h"

using namespace invar;

namespace {

Parameter parameter_of(std::vector<int64_t> shape, bool transposed = false, int64_t column_block = 1) {
  Parameter parameter;
  parameter.name = "w";
  parameter.shape = std::move(shape);
  parameter.transposed = transposed;
  parameter.column_block = column_block;
  return parameter;
}

std::vector<float> random_values(int64_t count) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> values(static_cast<size_t>(count));
  std::generate(values.begin(), values.end(), [&] { return value(random); });
  return values;
}

// Rows of the unit-major form out of the logical tensor.
std::vector<float> stored_rows(const Parameter& parameter, const std::vector<float>& logical, Range rows) {
  std::vector<float> stored;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t col = 0; col < parameter.cols(); ++col) {
      stored.push_back(logical[static_cast<size_t>(parameter.logical_index(row, col))]);
    }
  }
  return stored;
}

// Adds rows of the parameter's unit-major form to the blocks of its logical tensor.
void add_rows(const Parameter& parameter, Range rows, std::vector<float> stored, std::vector<int64_t>& blocks) {
  const ops::HashedRows all{{0, rows.size()}, parameter.logical_index().from_row(rows.begin)};
  ops::add_block_hashes(Stream(DeviceType::kCpu), view_of(stored).view({rows.size(), parameter.cols()}), {&all, 1},
                        view_of(blocks));
}

std::vector<int64_t> blocks_of(const std::vector<float>& logical) {
  const Parameter whole = parameter_of({std::ssize(logical)});
  std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(std::ssize(logical))));
  add_rows(whole, {0, whole.rows()}, logical, blocks);
  return blocks;
}

uint64_t hash_of(const std::vector<float>& logical) {
  return hash_tensor(blocks_of(logical));
}

// The blocks as ranks that hold runs of random lengths would put them together, in any order.
std::vector<int64_t> sharded_blocks(const Parameter& parameter, const std::vector<float>& logical, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Range> runs;
  for (int64_t row = 0; row < parameter.rows();) {
    const int64_t end = std::min<int64_t>(parameter.rows(), row + 1 + static_cast<int64_t>(random() % 9));
    runs.push_back({row, end});
    row = end;
  }
  std::shuffle(runs.begin(), runs.end(), random);
  std::vector<int64_t> total(static_cast<size_t>(hash_blocks(parameter.numel())));
  for (const Range& rows : runs) {
    std::vector<int64_t> mine(total.size());
    add_rows(parameter, rows, stored_rows(parameter, logical, rows), mine);
    std::transform(mine.begin(), mine.end(), total.begin(), total.begin(), [](int64_t a, int64_t b) {
      return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    });
  }
  return total;
}

StateHash state_of(const std::vector<std::pair<std::string, std::vector<float>>>& tensors) {
  StateHash hash;
  for (const auto& [name, values] : tensors) {
    hash.of(StateKind::kWeights).push_back({name, {std::ssize(values)}, blocks_of(values)});
  }
  return hash;
}

}  // namespace

TEST_CASE("Blocks are the same at every sharding and storage") {
  const std::vector<float> logical = random_values(60 * 210);
  const std::vector<int64_t> expected = blocks_of(logical);
  REQUIRE(expected.size() == 4);
  for (unsigned seed = 0; seed < 10; ++seed) {
    CHECK(sharded_blocks(parameter_of({60, 210}), logical, seed) == expected);
    CHECK(sharded_blocks(parameter_of({60, 210}, true), logical, seed) == expected);
    CHECK(sharded_blocks(parameter_of({60, 210}, true, 14), logical, seed) == expected);
    CHECK(sharded_blocks(parameter_of({3, 4200}, true, 60), logical, seed) == expected);  // across blocks
    CHECK(sharded_blocks(parameter_of({12600}), logical, seed) == expected);
  }
  // Other values in the same storage are another tensor.
  const Parameter plain = parameter_of({60, 210}), turned = parameter_of({60, 210}, true);
  std::vector<int64_t> blocks(4);
  add_rows(plain, {0, 60}, stored_rows(turned, logical, {0, 210}), blocks);
  CHECK(blocks != expected);
}

TEST_CASE("Every bit and every place counts") {
  const std::vector<float> values = random_values(2 * kHashBlock + 5);
  const uint64_t hash = hash_of(values);
  for (size_t at = 0; at < values.size(); at += 911) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      std::vector<float> other = values;
      other[at] = std::bit_cast<float>(std::bit_cast<uint32_t>(other[at]) ^ (1u << bit));
      CHECK(hash_of(other) != hash);
    }
  }
  std::vector<float> swapped = values;
  std::swap(swapped[1], swapped[2]);
  CHECK(hash_of(swapped) != hash);
  std::vector<float> turned = values;  // two whole blocks
  std::rotate(turned.begin(), turned.begin() + kHashBlock, turned.begin() + 2 * kHashBlock);
  CHECK(blocks_of(turned)[0] == blocks_of(values)[1]);
  CHECK(hash_of(turned) != hash);
  CHECK(hash_of({0.0f, 1.0f}) != hash_of({-0.0f, 1.0f}));
  const float nan = std::nanf("");
  CHECK(hash_of({nan}) == hash_of({nan}));
  CHECK(hash_of({nan}) != hash_of({-nan}));
  CHECK(hash_of({0.0f}) != hash_of({0.0f, 0.0f}));
}

TEST_CASE("One changed element changes its block alone") {
  const std::vector<float> values = random_values(3 * kHashBlock);
  std::vector<float> other = values;
  other[kHashBlock + 17] += 1;
  const std::vector<int64_t> a = blocks_of(values), b = blocks_of(other);
  CHECK(a[0] == b[0]);
  CHECK(a[1] != b[1]);
  CHECK(a[2] == b[2]);
}

TEST_CASE("A state is its tensors by name, in any order, with loss and norm") {
  const std::vector<float> x = random_values(10), y = random_values(11);
  const StateDigest digest = state_of({{"x", x}, {"y", y}}).digest(1, 2);
  const StateDigest same = state_of({{"y", y}, {"x", x}}).digest(1, 2);
  CHECK(same.kinds == digest.kinds);
  CHECK(same.combined == digest.combined);
  CHECK(state_of({{"x", y}, {"y", x}}).digest(1, 2).kinds[0] != digest.kinds[0]);
  CHECK(state_of({{"x", x}}).digest(1, 2).kinds[0] != digest.kinds[0]);
  const StateDigest other_loss = state_of({{"x", x}, {"y", y}}).digest(std::nextafter(1, 2), 2);
  CHECK(other_loss.kinds == digest.kinds);
  CHECK(other_loss.combined != digest.combined);
  CHECK(state_of({{"x", x}, {"y", y}}).digest(2, 1).combined != digest.combined);
  StateHash elsewhere = state_of({{"x", x}, {"y", y}});
  std::swap(elsewhere.of(StateKind::kWeights), elsewhere.of(StateKind::kGradients));
  CHECK(elsewhere.digest(1, 2).combined != digest.combined);
}

// Files of other versions hold these.
TEST_CASE("The hash of known bits is known") {
  std::vector<float> values(5000);
  std::iota(values.begin(), values.end(), -2500.0f);
  const std::vector<int64_t> blocks = blocks_of(values);
  CHECK(hash_text(static_cast<uint64_t>(blocks[0])) == "c5ac2742038b5f22");
  CHECK(hash_text(static_cast<uint64_t>(blocks[1])) == "6396346b719183ae");
  CHECK(hash_text(hash_tensor(blocks)) == "9f7256cda734668d");
  const StateDigest digest = state_of({{"w", values}}).digest(0.5, -0.0);
  CHECK(hash_text(digest.kinds[0]) == "62005e8d0a9d8e01");
  CHECK(hash_text(digest.combined) == "d69c265e176df42f");
}
