#include "config/replica_shares.h"

#include <algorithm>

#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

using Shares = std::vector<int64_t>;

Config invariant_config(int64_t workers, int64_t micro_batch) {
  Config config = valid_config();
  config.numerics.reduction = Reduction::kInvariant;
  config.numerics.workers = workers;
  config.train.micro_batch_size = micro_batch;
  return config;
}

Shares share(const Config& config, int64_t batch, const std::vector<double>& speeds) {
  return share_samples(config, batch, static_cast<int>(speeds.size()), speeds);
}

double step_time(const Shares& shares, const std::vector<double>& speeds) {
  double longest = 0;
  for (size_t r = 0; r < shares.size(); ++r) longest = std::max(longest, static_cast<double>(shares[r]) / speeds[r]);
  return longest;
}

// The shortest step of all ways to share `count` micro-batches.
double shortest_step(int64_t count, const std::vector<double>& speeds, size_t replica = 0) {
  if (replica + 1 == speeds.size()) return static_cast<double>(count) / speeds[replica];
  double shortest = 1e300;
  for (int64_t own = 0; own <= count; ++own) {
    shortest = std::min(shortest, std::max(static_cast<double>(own) / speeds[replica],
                                           shortest_step(count - own, speeds, replica + 1)));
  }
  return shortest;
}

}  // namespace

TEST_CASE("a replica's time is that of the rank with the most units") {
  Config config = valid_config();
  // Multiply-adds of a token: 4 layers of 2·48·16·(8 + 4) and 2·16·8·16 in attention, 3·48·96 in the FFN, head 48·256.
  const double attention = 4 * (18432 + 4096);
  const double ffn = 4 * 13824;
  const double head = 12288;
  const double all = attention + ffn + head;
  CHECK(modelled_time(config, 1) == 1);
  CHECK(modelled_time(config, 2) == Approx(0.5));
  CHECK(modelled_time(config, 3) == Approx((attention * 2 / 4 + ffn / 3 + head * 6 / 16) / all));
  CHECK(modelled_time(config, 4) == Approx(0.25));
  CHECK(modelled_time(config, 5) == Approx((attention * 2 / 8 + ffn * 20 / 96 + head * 4 / 16) / all));
  CHECK(modelled_time(config, 8) == Approx(0.125));

  config.numerics.reduction = Reduction::kInvariant;  // ranks hold whole leaves, of 4, 96 and 16 units
  config.numerics.leaves = 4;
  CHECK(modelled_time(config, 3) == Approx(0.5));
  config.numerics.leaves = 8;  // two runs of one query head in each group
  CHECK(modelled_time(config, 8) == Approx((attention / 8 + ffn * 12 / 96 + head * 2 / 16) / all));
  CHECK(modelled_time(config, 5) == Approx((attention * 2 / 8 + ffn * 24 / 96 + head * 4 / 16) / all));
}

TEST_CASE("layers of different kinds count with their own units") {
  Config config = valid_config();
  config.model.num_hidden_layers = 2;
  config.model.layer_types = "sf";
  config.model.sliding_window = 8;
  config.model.global_head_dim = 32;
  config.model.num_global_key_value_heads = 2;
  config.model.attention_k_eq_v = true;
  config.model.hidden_size_per_layer_input = 16;  // 8 blocks of 2 columns
  const double sliding = 2 * 48 * 16 * 12 + 2 * 8 * 8 * 16;
  const double full = 2 * 48 * 32 * 10 + 2 * 16 * 8 * 32;
  const double ffn = 2 * 13824;
  const double inputs = 2 * 3 * 48 * 16;
  const double head = 12288;
  CHECK(modelled_time(config, 3) == Approx((sliding / 2 + full / 2 + ffn / 3 + inputs * 3 / 8 + head * 6 / 16) /
                                           (sliding + full + ffn + inputs + head)));
}

TEST_CASE("the batch is shared by speed") {
  const Config config = valid_config();
  CHECK(share(config, 7, {1, 0.75}) == Shares{4, 3});
  CHECK(share(config, 7, {4, 3}) == Shares{4, 3});
  CHECK(share(config, 15, {8, 7}) == Shares{8, 7});
  CHECK(share(config, 4, {1, 1, 1}) == Shares{2, 1, 1});
  CHECK(share(config, 5, {1, 1, 2}) == Shares{1, 1, 3});

  Config two = valid_config();
  two.train.micro_batch_size = 2;
  CHECK(share(two, 14, {1, 0.75}) == Shares{8, 6});
  require_error(ErrorKind::kConfig, {"train.global_batch_size = 7 is not a multiple of train.micro_batch_size = 2"},
                {"use 8"}, [&] {
                  share(two, 7, {1, 1});
                });
}

TEST_CASE("no other shares of the batch take less time") {
  const Config config = valid_config();
  const std::vector<std::vector<double>> all_speeds = {{1, 0.75}, {8, 7}, {1, 0.31}, {3, 2, 2}, {1, 0.9, 0.55}};
  for (const std::vector<double>& speeds : all_speeds) {
    for (int64_t batch = 5; batch <= 20; ++batch) {
      const Shares shares = share(config, batch, speeds);
      INFO(batch << " over " << speeds.size());
      CHECK(shares[0] + shares[1] + (speeds.size() > 2 ? shares[2] : 0) == batch);
      CHECK(step_time(shares, speeds) == Approx(shortest_step(batch, speeds)));
    }
  }
}

TEST_CASE("a replica without a share is refused") {
  const Config config = valid_config();
  require_error(ErrorKind::kConfig, {"2 samples in shares of 1 (train.micro_batch_size)", "one of 3 replicas"},
                {"larger train.global_batch_size", "min_tensor"}, [&] {
                  share(config, 2, {1, 1, 1});
                });
  require_error(ErrorKind::kConfig, {"8 samples in shares of 8 (whole workers of numerics.workers"},
                {"numerics.workers"}, [] {
                  share(invariant_config(3, 1), 8, {1, 1});
                });
}

TEST_CASE("as many shares as replicas are one for each") {
  const std::vector<std::vector<double>> all_speeds = {{2, 1}, {1, 2}, {1, 0.01}, {4, 3, 1}, {1, 1, 4, 4}};
  for (const std::vector<double>& speeds : all_speeds) {
    const auto replicas = std::ssize(speeds);
    CHECK(share(valid_config(), replicas, speeds) == Shares(speeds.size(), 1));
    CHECK(share(invariant_config(replicas, 1), 6 * replicas, speeds) == Shares(speeds.size(), 6));
  }
  CHECK(share(valid_config(), 4, {1, 0.1}) == Shares{3, 1});
}

TEST_CASE("with invariant numerics shares are whole workers and micro-batches") {
  CHECK(share(invariant_config(8, 1), 16, {1, 0.75}) == Shares{10, 6});
  CHECK(share(invariant_config(8, 4), 16, {1, 0.75}) == Shares{8, 8});
  CHECK(share(invariant_config(16, 1), 16, {1, 0.75}) == Shares{9, 7});
  // Of 6 workers in 8 samples, every third begins at a whole 8 · w / 6.
  CHECK(share(invariant_config(6, 1), 8, {1, 0.9}) == Shares{4, 4});
  for (const int64_t workers : {1, 2, 3, 4, 6, 8, 12, 24}) {
    for (const int64_t micro : {1, 2, 3, 4, 6}) {
      const int64_t unit = share_unit(invariant_config(workers, micro), 24);
      CHECK(unit % micro == 0);
      CHECK(unit % (24 / workers) == 0);
      CHECK(24 % unit == 0);
    }
  }
}

TEST_CASE("a batch that shrinks leaves the fast replicas their share") {
  Config config = valid_config();
  config.parallel.nonuniform.batch = BatchPolicy::kShrink;
  CHECK(share(config, 16, {1, 0.75}) == Shares{8, 6});
  CHECK(share(config, 16, {8, 7}) == Shares{8, 7});
  CHECK(share(config, 16, {0.8, 1}) == Shares{6, 8});
  CHECK(share(config, 16, {1, 0.01}) == Shares{8, 1});
  CHECK(share(config, 16, {2, 2}) == Shares{8, 8});
  const std::vector<double> live = {1, 0.75};  // of three replicas
  CHECK(share_samples(config, 24, 3, live) == Shares{8, 6});
  CHECK(share(config, 3, {1, 1, 1}) == Shares{1, 1, 1});
  require_error(ErrorKind::kConfig, {"2 samples in shares of 1", "one of 3 replicas without any"}, {"larger train.glo"},
                [&] {
                  share(config, 2, {1, 1, 1});
                });

  for (const int64_t workers : {2, 4}) {
    Config invariant = invariant_config(workers, 1);
    invariant.parallel.nonuniform.batch = BatchPolicy::kShrink;
    CHECK(share(invariant, 16, {1, 0.75}) == Shares{6, 6});
  }
  Config invariant = invariant_config(7, 1);
  invariant.parallel.nonuniform.batch = BatchPolicy::kShrink;
  CHECK(share(invariant, 16, {1, 0.75}) == Shares{8, 6});
  invariant.numerics.workers = 15;  // more than the samples that are left
  require_error(ErrorKind::kConfig, {"14 samples"}, {"numerics.workers"}, [&] { share(invariant, 16, {1, 0.75}); });
}
