#include <algorithm>
#include <set>

#include "app/layout_matrix.h"
#include "config/validation.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::app;

namespace {

constexpr int64_t kSequence = 8;

Config model(int64_t heads, int64_t kv_heads) {
  Config config;
  ModelConfig& model = config.model;
  model.vocab_size = 250;
  model.hidden_size = 48;
  model.intermediate_size = 96;
  model.num_hidden_layers = 1;
  model.num_attention_heads = heads;
  model.num_key_value_heads = kv_heads;
  model.head_dim = 16;
  return config;
}

// Tensor degree, and whether it cuts unevenly.
std::set<std::pair<int, bool>> cuts(const LayoutMatrix& matrix) {
  std::set<std::pair<int, bool>> found;
  for (const Layout& layout : matrix.layouts) found.insert({layout.tensor, layout.uneven});
  return found;
}

int left_out(const LayoutMatrix& matrix) {
  int count = 0;
  for (const auto& [reason, layouts] : matrix.left_out) count += layouts;
  return count;
}

bool contains(const LayoutMatrix& matrix, const Layout& layout) {
  return std::find(matrix.layouts.begin(), matrix.layouts.end(), layout) != matrix.layouts.end();
}

// Every layout that is offered is one that a run accepts.
void check_valid(const LayoutMatrix& matrix, Config config, int64_t batch, int64_t sequence = kSequence) {
  config.train.steps = 1;
  config.train.sequence_length = sequence;
  config.train.global_batch_size = batch;
  for (const Layout& layout : matrix.layouts) {
    layout.apply_to(config);
    INFO("tensor " << layout.tensor << " data " << layout.data << " micro-batch " << layout.micro_batch);
    CHECK_NOTHROW(validate(config, layout.ranks()));
  }
}

constexpr int kAll = 76;

}  // namespace

TEST_CASE("eight heads and a batch of 16: nothing is left out, three ranks alone cut unevenly") {
  const LayoutMatrix matrix = layout_matrix(model(8, 4), 16, kSequence);
  CHECK(matrix.left_out.empty());
  CHECK(matrix.layouts.size() == kAll);
  CHECK(cuts(matrix) == std::set<std::pair<int, bool>>{{1, false}, {2, false}, {3, true}, {4, false}, {8, false}});
  for (const int data : {1, 2, 4}) {
    for (const int64_t micro : {1, 4}) CHECK(contains(matrix, {2, true, data, micro}));
    CHECK(contains(matrix, {2, true, data, 2, RecomputeKind::kSelective}));
  }
  CHECK(contains(matrix, {8, true, 1, 1, RecomputeKind::kFull}));
  check_valid(matrix, model(8, 4), 16);
}

TEST_CASE("four heads and a batch of 6: what does not fit is left out and counted by its reason") {
  const LayoutMatrix matrix = layout_matrix(model(4, 2), 6, kSequence);
  CHECK(cuts(matrix) == std::set<std::pair<int, bool>>{{1, false}, {2, false}, {3, true}, {4, false}});
  CHECK(matrix.layouts.size() + static_cast<size_t>(left_out(matrix)) == kAll);
  CHECK(matrix.left_out.at("tensor 8: this model can be cut into at most 4 parts") == 8);
  // micro-batch · data of 1 and 2 divide 6; of 4, 8 and 16 do not.
  for (const Layout& layout : matrix.layouts) CHECK(layout.micro_batch * layout.data <= 2);
  CHECK(contains(matrix, {2, false, 2, 1}));
  CHECK(matrix.left_out.at("micro-batch · data = 16: does not divide the batch of 6") == 3);  // tensor 1 and 2
  check_valid(matrix, model(4, 2), 6);
}

TEST_CASE("an odd batch leaves one sample at a time") {
  const LayoutMatrix matrix = layout_matrix(model(8, 4), 3, kSequence);
  CHECK(matrix.layouts.size() == 2 * 9);  // with none and with full recomputation
  check_valid(matrix, model(8, 4), 3);
}

TEST_CASE("sequence parallelism needs a token for every rank") {
  const LayoutMatrix matrix = layout_matrix(model(8, 4), 4, 2);
  CHECK_FALSE(contains(matrix, {8, true, 1, 2}));
  CHECK(contains(matrix, {8, true, 1, 4}));
  CHECK(contains(matrix, {8, false, 1, 1}));
  CHECK(matrix.left_out.at("sequence on: a micro-batch of 4 tokens has none for some of 8 ranks") == 1);
  check_valid(matrix, model(8, 4), 4, 2);
}

TEST_CASE("equal parts are preferred to uneven ones") {
  CHECK(cuts(layout_matrix(model(6, 3), 4, kSequence)) ==
        std::set<std::pair<int, bool>>{{1, false}, {2, true}, {3, false}, {4, true}});
}

TEST_CASE("invariant numerics: ranks hold whole leaves and workers") {
  Config config = model(8, 4);
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = 2;
  const std::set<std::pair<int, bool>> halves = cuts(layout_matrix(config, 16, kSequence));  // of KV groups
  CHECK(halves == std::set<std::pair<int, bool>>{{1, false}, {2, false}, {3, true}, {4, false}, {8, false}});
  config.numerics.leaves = 4;
  const LayoutMatrix matrix = layout_matrix(config, 16, kSequence);
  CHECK(cuts(matrix) == std::set<std::pair<int, bool>>{{1, false}, {2, false}, {3, true}, {4, false}});
  for (const Layout& layout : matrix.layouts) CHECK(layout.data <= 2);
  CHECK(matrix.left_out.at("tensor 8: this model can be cut into at most 4 parts") == 8);
  // Tensor 1 at three micro-batches and with recomputation, tensor 2 at that with and without sequence parallelism.
  CHECK(matrix.left_out.at("data 4: its ranks do not hold whole workers of 2 in all") == 4 + 8);
  CHECK(matrix.layouts.size() + static_cast<size_t>(left_out(matrix)) == kAll);
  check_valid(matrix, config, 16);
}
