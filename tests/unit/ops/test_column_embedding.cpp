#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/embedding.h"

namespace invar::ops {
namespace {

using namespace invar::test;

constexpr int64_t kVocabulary = 11;
const Values kTokens = {3, 10, 0, 3, 7, 3, 4};

// A table (V, blocks · block) as (blocks, V · block).
HostTensor by_columns(const HostTensor& table, int64_t block) {
  const int64_t rows = table.tensor().dim(0), width = table.tensor().dim(1);
  HostTensor cut(table.tensor().dtype(), {width / block, rows * block});
  for (int64_t v = 0; v < rows; ++v) {
    for (int64_t column = 0; column < width; ++column) {
      cut.set(static_cast<size_t>(column / block * rows * block + v * block + column % block),
              table[static_cast<size_t>(v * width + column)]);
    }
  }
  return cut;
}

TEST_CASE("column_embedding has the bits of the plain embedding of the same table") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t block = GENERATE(1, 3, 16), blocks = GENERATE(1, 2, 7), count = 7, width = blocks * block;
  const LookupParams params = GENERATE(values<LookupParams>({{}, {16.0f, -1}, {0.3f, 0}, {1.3f, 3}}));
  const HostTensor tokens(DType::kI32, {count}, kTokens);
  const HostTensor table = random_tensor(dtype, {kVocabulary, width}, 1);
  HostTensor plain(dtype, {count, width}), cut(dtype, {count, width});
  embedding_forward(kCpu, params, tokens, table, {0, kVocabulary}, plain);
  column_embedding_forward(kCpu, params, tokens, by_columns(table, block), block, cut);
  CHECK(cut.same_bits(plain));

  const HostTensor d_out = random_tensor(dtype, {count, width}, 2);
  HostTensor d_plain = random_tensor(DType::kF32, {kVocabulary, width}, 3);
  HostTensor d_cut = by_columns(d_plain, block);
  embedding_backward(kCpu, params, tokens, d_out, {0, kVocabulary}, d_plain.tensor());
  column_embedding_backward(kCpu, params, tokens, d_out, block, d_cut.tensor());
  CHECK(d_cut.same_bits(by_columns(d_plain, block)));

  if (params.scale < 1) return;
  const HostTensor second = random_tensor(DType::kF32, {kVocabulary, width}, 4);
  HostTensor plain_top = second, cut_top = by_columns(second, block);
  const std::vector<SamplePlace> places = {{1, false, 0}, {2, true, 1}, {1, false, 1}, {1, true, 0},
                                           {2, true, 0},  {3, true, 2}, {1, false, 0}};
  embedding_backward(kCpu, params, tokens, d_out, {0, kVocabulary}, {places, {d_plain, plain_top}});
  column_embedding_backward(kCpu, params, tokens, d_out, block, {places, {d_cut, cut_top}});
  CHECK(d_cut.same_bits(by_columns(d_plain, block)));
  CHECK(cut_top.same_bits(by_columns(plain_top, block)));
}

TEST_CASE("column_embedding is the formula and its derivative") {
  const int64_t block = GENERATE(1, 3, 16), blocks = GENERATE(1, 4), count = 7, width = blocks * block;
  const LookupParams params{0.3f, 3};
  const HostTensor tokens(DType::kI32, {count}, kTokens);
  const HostTensor table = random_tensor(DType::kF32, {blocks, kVocabulary * block}, 1);
  const HostTensor d_out = random_tensor(DType::kF32, {count, width}, 2);
  const auto formula = [&](const Values& cut) {
    Values out;
    for (const double token : kTokens) {
      for (int64_t j = 0; j < blocks; ++j) {
        for (int64_t c = 0; c < block; ++c) {
          out.push_back(static_cast<double>(params.scale) *
                        cut[static_cast<size_t>(j * kVocabulary * block + static_cast<int64_t>(token) * block + c)]);
        }
      }
    }
    return out;
  };
  HostTensor out(DType::kF32, {count, width});
  column_embedding_forward(kCpu, params, tokens, table, block, out);
  require_rounded(out, formula(table.values()));

  HostTensor d_table = random_tensor(DType::kF32, {blocks, kVocabulary * block}, 3);
  const Values start = d_table.values();
  Values numeric = numeric_gradient([&](const Values& t) { return dot(formula(t), d_out.values()); }, table.values());
  for (size_t i = 0; i < numeric.size(); ++i) {
    if (static_cast<int64_t>(i) / block % kVocabulary == params.frozen_token) numeric[i] = 0;
  }
  column_embedding_backward(kCpu, params, tokens, d_out, block, d_table.tensor());
  require_close(d_table.values(), plus(start, numeric), 2e-6, 2e-6);
}

TEST_CASE("column_embedding gives the same bits on two threads") {
  const int64_t block = GENERATE(1, 16), blocks = 512 / block + 1, width = blocks * block, count = 101;
  REQUIRE(width * count >= 2 * cpu::kMinWorkPerThread);
  const LookupParams params{0.3f, 4};
  HostTensor tokens(DType::kI32, {count});
  for (size_t t = 0; t < tokens.size(); ++t) tokens.set(t, static_cast<double>(t * t % 11));
  const HostTensor table = random_tensor(DType::kBF16, {blocks, kVocabulary * block}, 1);
  HostTensor one(DType::kBF16, {count, width}), two = one;
  column_embedding_forward(kCpu, params, tokens, table, block, one);
  column_embedding_forward(kTwoThreads, params, tokens, table, block, two);
  CHECK(two.same_bits(one));
  HostTensor d_one = random_tensor(DType::kF32, {blocks, kVocabulary * block}, 3), d_two = d_one;
  column_embedding_backward(kCpu, params, tokens, one, block, d_one.tensor());
  column_embedding_backward(kTwoThreads, params, tokens, one, block, d_two.tensor());
  CHECK(d_two.same_bits(d_one));
}

TEST_CASE("column_embedding of no tokens, on meta, and of wrong operands") {
  const HostTensor none(DType::kI32, {0}), out_none(DType::kF32, {0, 6}), table(DType::kF32, {2, 15});
  column_embedding_forward(kCpu, {}, none, table, 3, out_none);
  column_embedding_backward(kCpu, {}, none, out_none, 3, table.tensor());

  const HostTensor tokens(DType::kI32, {3}), out(DType::kF32, {3, 6}), bf16(DType::kBF16, {2, 15});
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  column_embedding_forward(kMeta, {}, meta(tokens), meta(table), 3, meta(out));
  column_embedding_backward(kMeta, {}, meta(tokens), meta(out), 3, meta(table));

  const auto forward = [&](const Tensor& ids, const Tensor& from, int64_t block) {
    return message_of(ErrorKind::kFault, [&] { column_embedding_forward(kCpu, {}, ids, from, block, out); });
  };
  CHECK(contains(forward(tokens, table, 4), "column_embedding_forward: table f32 (2, 15) is not rows of blocks of 4"));
  CHECK(contains(forward(tokens, table, 0), "not rows of blocks of 0"));
  CHECK(contains(forward(tokens, table, 5), "out is f32 (3, 6), expected f32 (3, 10)"));
  CHECK(contains(forward(tokens, bf16, 3), "table is bf16"));
  CHECK(contains(forward(none, table, 3), "tokens is i32 (0)"));
  const auto backward = [&](const Tensor& ids, const SampleSums& d_table, int64_t block) {
    return message_of(ErrorKind::kFault, [&] { column_embedding_backward(kCpu, {}, ids, out, block, d_table); });
  };
  CHECK(contains(backward(tokens, bf16.tensor(), 3), "column_embedding_backward: d_table is bf16"));
  CHECK(contains(backward(tokens, table.tensor(), 2), "d_table f32 (2, 15) is not rows of blocks of 2"));
  CHECK(contains(backward(none, table.tensor(), 3), "tokens is i32 (0)"));
  const HostTensor longer(DType::kF32, {2, 18});
  CHECK(contains(backward(tokens, {{{}}, {table, longer}}, 3), "d_table is f32 (2, 18), expected f32 (2, 15)"));
  CHECK(contains(backward(tokens, {{{}}, {table, meta(table)}}, 3), "on meta, but the stream is on cpu"));
}

}  // namespace
}  // namespace invar::ops
