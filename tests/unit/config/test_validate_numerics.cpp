#include "core/format.h"
#include "validation_checks.h"

using namespace invar;
using namespace invar::test;

namespace {

// 8 query and 4 KV heads, 96 FFN blocks, 16 vocabulary units; 8 leaves and 8 workers of one sample.
template <typename Change>
auto invariant(Change change) {
  return [=](Config& c) {
    c.numerics.reduction = Reduction::kInvariant;
    c.train.global_batch_size = 8;
    change(c);
  };
}

auto invariant_tensor(int tensor, bool uneven = false, int64_t leaves = 8) {
  return invariant([=](Config& c) {
    c.parallel.tensor = tensor, c.parallel.uneven = uneven;
    c.numerics.leaves = leaves;
  });
}

}  // namespace

TEST_CASE("constants of the contract are of invariant numerics alone") {
  using N = NumericsConfig;
  for (const auto& [member, key] : {std::pair{&N::leaves, "numerics.leaves"}, {&N::workers, "numerics.workers"}}) {
    const auto set = [member = member](int64_t value) { return [=](Config& c) { c.numerics.*member = value; }; };
    refuses(set(4), format("{} = 4 would be ignored with numerics.reduction: fast", key), format("remove {}", key));
    refuses(set(0), format("{} = 0 must be 1 to", key), format("set {} to at least 1", key));
    accepts(invariant(set(4)));
    refuses(invariant(set(0)), format("{} = 0 must be 1 to", key), format("set {} to at least 1", key));
  }
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    accepts(invariant([=](Config& c) { c.numerics.precision = precision; }));
  }
  accepts(invariant([](Config& c) {
    c.parallel.bucket_size = 1, c.train.recompute = RecomputeKind::kFull, c.comm.synchronous = true;
  }));
}

TEST_CASE("terms of tensor ranks in bf16 are of models in bf16 alone") {
  const auto set = [](Config& c) { c.numerics.tensor_reduce_dtype = Precision::kBF16; };
  const auto of = [set](Precision precision) { return [=](Config& c) { set(c), c.numerics.precision = precision; }; };
  accepts(of(Precision::kBF16));
  refuses(of(Precision::kF32), "numerics.tensor_reduce_dtype = bf16 would be ignored with numerics.precision: fp32",
          "remove numerics.tensor_reduce_dtype");
  accepts(invariant(of(Precision::kBF16)));
  refuses(invariant(of(Precision::kF32)), "would be ignored with numerics.precision: fp32",
          "remove numerics.tensor_reduce_dtype");
}

TEST_CASE("invariant: tensor ranks hold whole leaves") {
  for (const int tensor : {1, 2, 4}) accepts(invariant_tensor(tensor, false, 4), tensor);
  refuses(invariant_tensor(4, false, 2),
          "parallel.tensor = 4 exceeds 2 leaves, which ranks hold whole (numerics.leaves)",
          "use 1 or 2, or numerics.leaves: 4 (other bits)");
  refuses(invariant_tensor(4, true, 3), "parallel.tensor = 4 exceeds 3 leaves", "use at most 3, or numerics.leaves: 4");

  // Three of four heads: as without leaves.
  refuses(invariant_tensor(3),
          "parallel.tensor = 3 does not divide 4 leaves of 4 key and value heads equally (model.num_key_value_heads)",
          "use 1, 2, 4 or 8 (at 3 ranks 1), or parallel.uneven: true", 3);
  accepts(invariant_tensor(3, true), 1 * 3);

  // 96 FFN blocks divide by 3, but not 8 leaves of them.
  const auto six_heads = [](int tensor, bool uneven, int64_t leaves) {
    return [=](Config& c) {
      invariant_tensor(tensor, uneven, leaves)(c);
      c.model.num_attention_heads = 6, c.model.num_key_value_heads = 6;
      c.train.global_batch_size = 8;
    };
  };
  refuses(six_heads(3, false, 8), "parallel.tensor = 3 does not divide 8 leaves of 96 FFN blocks equally",
          "or parallel.uneven: true", 3);
  accepts(six_heads(3, true, 8), 3);
  accepts(six_heads(3, false, 6), 3);
  // Two ranks hold two leaves each, of 2 + 2 and of 1 + 1 heads.
  refuses(six_heads(2, false, 4), "parallel.tensor = 2 does not divide 4 leaves of 6 key and value heads equally",
          "use 1, or parallel.uneven: true", 2);
  accepts(six_heads(2, true, 4), 2);

  // The vocabulary is cut unequally without asking: 16 units in 6 leaves.
  accepts(six_heads(2, false, 6), 2);
  accepts(six_heads(6, false, 6), 6);
}

TEST_CASE("invariant: tensor ranks beyond the key and value heads hold whole runs of query heads") {
  for (const int tensor : {1, 2, 4, 8}) accepts(invariant_tensor(tensor), tensor);  // eight leaves of a head each
  refuses(invariant_tensor(8, false, 4), "parallel.tensor = 8 exceeds 4 leaves, which ranks hold whole",
          "use 1, 2 or 4, or numerics.leaves: 8 (other bits)", 8);
  refuses(invariant_tensor(16, true, 16), "parallel.tensor = 16 exceeds 8 query heads (model.num_attention_heads)",
          "use at most 8", 16);
  refuses(invariant_tensor(6), "parallel.tensor = 6 is no multiple of 4 key and value heads",
          "use 1, 2, 4 or 8 (at 6 ranks 1 or 2), or parallel.uneven: true", 6);
  accepts(invariant_tensor(6, true), 6);
  // Six are wanted, but each of the four groups has two runs or one.
  refuses(invariant_tensor(8, true, 6), "parallel.tensor = 8 exceeds 6 leaves", "use at most 6", 8);

  const auto three_each = [](int tensor, bool uneven, int64_t leaves) {
    return [=](Config& c) {
      invariant_tensor(tensor, uneven, leaves)(c);
      c.model.num_attention_heads = 6, c.model.num_key_value_heads = 2;
    };
  };
  refuses(three_each(4, false, 8),
          "parallel.tensor = 4 does not divide 6 leaves of 6 query heads equally (model.num_attention_heads)",
          "use 1 or 2, or parallel.uneven: true", 4);
  accepts(three_each(4, true, 8), 4);
  accepts(three_each(6, false, 6), 6);
  // Runs of two and of one head.
  refuses(three_each(4, false, 4), "parallel.tensor = 4 does not divide 4 leaves of 6 query heads equally",
          "or parallel.uneven: true", 4);
  accepts(three_each(4, true, 4), 4);
}

TEST_CASE("invariant: every kind of layer has its leaves") {
  const auto gemma = [](int tensor, int64_t global_heads, int64_t per_layer) {
    return [=](Config& c) {
      invariant_tensor(tensor)(c);
      c.model.family = "gemma4", c.model.layer_types = "sf", c.model.sliding_window = 8;
      c.model.num_global_key_value_heads = global_heads, c.model.attention_k_eq_v = global_heads > 0;
      c.model.hidden_size_per_layer_input = per_layer;
      c.model.num_kv_shared_layers = 2, c.model.use_double_wide_mlp = true;
    };
  };
  accepts(gemma(4, 0, 0));
  accepts(gemma(2, 2, 8), 2);
  accepts(gemma(4, 2, 8), 4);  // two ranks for each of the full layers' heads
  accepts(gemma(8, 1, 8), 8);
  refuses(gemma(4, 4, 3), "parallel.tensor = 4 exceeds 3 blocks of the per-layer inputs", "use 1");
}

TEST_CASE("invariant: data ranks hold whole workers") {
  const auto workers = [](int64_t count, int64_t batch, int data = 0, int64_t micro = 1) {
    return invariant([=](Config& c) {
      c.numerics.workers = count, c.train.global_batch_size = batch, c.parallel.data = data;
      c.train.micro_batch_size = micro;
    });
  };
  for (const int data : {1, 2, 4, 8}) accepts(workers(8, 16, data), data);
  accepts(workers(8, 896, 1, 896), 1);
  refuses(workers(8, 897, 1, 897), "train.micro_batch_size = 897 exceeds 896, the most samples", "use a smaller one",
          1);
  accepts(workers(8, 16, 4, 4));  // a micro-batch of two workers
  refuses(workers(8, 4), "numerics.workers = 8 exceeds train.global_batch_size = 4",
          "use at most 4, or a larger batch");
  accepts(workers(4, 4));
  refuses(workers(8, 0), "numerics.workers = 8 exceeds train.global_batch_size = 4", "use at most 4");
  refuses(workers(8, 48, 3),
          "parallel.data = 3: its ranks hold 16 of 48 samples each, not whole workers (numerics.workers = 8)",
          "use parallel.data 1, 2, 4 or 8, or numerics.workers: 3 (other bits)", 3);
  refuses(workers(8, 16, 16), "parallel.data = 16: its ranks hold 1 of 16 samples each",
          "use parallel.data 1, 2, 4 or 8, or numerics.workers: 16", 16);
  // Workers of one and two samples: they begin at 0, 1, 3, 4, 6, 7, 9, 10.
  accepts(workers(8, 12, 4), 4);
  refuses(workers(8, 12, 6), "parallel.data = 6: its ranks hold 2 of 12 samples each", "use parallel.data 1, 2 or 4",
          6);
  // What fits is said of these micro-batches.
  refuses(workers(2, 16, 4, 2), "parallel.data = 4", "use parallel.data 1 or 2, or", 4);
}

TEST_CASE("invariant: sequences and their slices are whole token blocks") {
  const auto length = [](int64_t tokens, int64_t longest = 40960) {
    return invariant([=](Config& c) { c.train.sequence_length = tokens, c.model.max_position_embeddings = longest; });
  };
  for (const int64_t tokens : {1, 63, 64, 66, 128, 129, 4096}) accepts(length(tokens));
  accepts([](Config& c) { c.train.sequence_length = 65; });
  refuses(length(65), "train.sequence_length = 65 is no multiple of 2 tokens", "use 64 or 66");
  refuses(length(65, 65), "train.sequence_length = 65 is no multiple of 2 tokens", "use 64");
  refuses(length(4097), "train.sequence_length = 4097 is no multiple of 65 tokens", "use 4096 or 4160");

  const auto sequence = [](int64_t tokens, int64_t micro) {
    return invariant([=](Config& c) {
      c.parallel.tensor = 4, c.parallel.sequence = true;
      c.train.sequence_length = tokens, c.train.micro_batch_size = micro;
    });
  };
  accepts(sequence(4, 1));
  accepts(sequence(2, 2));
  refuses(sequence(3, 1), "parallel.sequence: true shares 3 tokens", "parallel.sequence: false");
}
