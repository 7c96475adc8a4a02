#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"

namespace invar::ops {
namespace {

using namespace invar::test;

constexpr int64_t kVocabulary = 11;
const Values kTokens = {3, 10, 0, 3, 7, 3, 4};  // a token three times; both ends of the table

HostTensor rows_of(const HostTensor& table, Range vocabulary) {
  const int64_t width = table.tensor().dim(1);
  HostTensor part(table.tensor().dtype(), {vocabulary.size(), width});
  for (size_t i = 0; i < part.size(); ++i) part.set(i, table[static_cast<size_t>(vocabulary.begin * width) + i]);
  return part;
}

TEST_CASE("embedding_forward over parts of the vocabulary sums to the bits of a plain lookup") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float scale = GENERATE(1.0f, 50.5f);
  const LookupParams params{scale};
  const int64_t width = GENERATE(1, 19), count = 7;
  const HostTensor tokens(DType::kI32, {count}, kTokens);
  HostTensor table = random_tensor(dtype, {kVocabulary, width}, 1);
  table.set(static_cast<size_t>(3 * width), -0.0);
  HostTensor whole(dtype, {count, width});
  embedding_forward(kCpu, params, tokens, table, {0, kVocabulary}, whole);
  Values expected(whole.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    const auto token = static_cast<size_t>(kTokens[i / static_cast<size_t>(width)]);
    expected[i] = table[token * static_cast<size_t>(width) + i % static_cast<size_t>(width)];
    if (scale == 1.0f) CHECK(whole[i] == expected[i]);
    expected[i] *= static_cast<double>(scale);
    CHECK(!(whole[i] == 0 && std::signbit(whole[i])));
  }
  require_rounded(whole, expected);

  HostTensor sum(dtype, {count, width}, Values(static_cast<size_t>(count * width), 0.0));
  for (const Range part : {Range{0, 4}, Range{4, 4}, Range{4, 10}, Range{10, 11}}) {
    HostTensor out(dtype, {count, width});
    embedding_forward(kCpu, params, tokens, rows_of(table, part), part, out);
    for (size_t i = 0; i < out.size(); ++i) {
      if (!part.contains(static_cast<int64_t>(kTokens[i / static_cast<size_t>(width)]))) {
        CHECK((out[i] == 0 && !std::signbit(out[i])));
      }
    }
    add(kCpu, sum, out, sum);
  }
  CHECK(sum.same_bits(whole));
}

TEST_CASE("embedding_backward adds the rows of d_out, tokens ascending") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = 21, count = 7;
  const HostTensor tokens(DType::kI32, {count}, kTokens);
  const HostTensor d_out = random_tensor(dtype, {count, width}, 2);
  const HostTensor start = random_tensor(DType::kF32, {kVocabulary, width}, 3);
  HostTensor whole = start;
  embedding_backward(kCpu, {}, tokens, d_out, {0, kVocabulary}, whole);

  HostTensor ascending = start, descending = start;  // fp32 additions, one by one
  for (size_t step = 0; step < d_out.size(); ++step) {
    const auto accumulate = [&](HostTensor& table, size_t i) {
      const size_t at = static_cast<size_t>(kTokens[i / width]) * width + i % width;
      table.set(at, static_cast<double>(static_cast<float>(table[at]) + static_cast<float>(d_out[i])));
    };
    accumulate(ascending, step);
    accumulate(descending, d_out.size() - 1 - step);
  }
  CHECK(whole.same_bits(ascending));
  if (dtype == DType::kF32) CHECK_FALSE(whole.same_bits(descending));

  for (const Range part : {Range{0, 4}, Range{4, 11}}) {
    HostTensor d_table = rows_of(start, part);
    embedding_backward(kCpu, {}, tokens, d_out, part, d_table);
    CHECK(d_table.same_bits(rows_of(whole, part)));
  }
}

TEST_CASE("embedding_backward is the derivative of the scaled lookup, but for the frozen token") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t frozen = GENERATE(-1, 0, 3, 5);  // 5 is not among the tokens
  const LookupParams params{0.7f, frozen};
  const int64_t width = 5, count = 7;
  const HostTensor tokens(DType::kI32, {count}, kTokens);
  const HostTensor d_out = random_tensor(dtype, {count, width}, 2);
  const HostTensor start = random_tensor(DType::kF32, {kVocabulary, width}, 3);
  const auto loss = [&](const Values& table) {
    double total = 0;
    for (size_t i = 0; i < d_out.size(); ++i) {
      total += static_cast<double>(params.scale) * table[static_cast<size_t>(kTokens[i / 5]) * 5 + i % 5] * d_out[i];
    }
    return total;
  };
  const Values numeric = numeric_gradient(loss, random_values(kVocabulary * width, 4));
  Values expected = start.values();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (static_cast<int64_t>(i) / width != frozen) expected[i] += numeric[i];
  }
  HostTensor whole = start;
  embedding_backward(kCpu, params, tokens, d_out, {0, kVocabulary}, whole);
  require_close(whole.values(), expected, 2e-6, 2e-6);
  if (frozen >= 0) CHECK(rows_of(whole, {frozen, frozen + 1}).same_bits(rows_of(start, {frozen, frozen + 1})));

  for (const Range part : {Range{0, 3}, Range{3, 11}}) {  // the token's number counts, not its row
    HostTensor d_table = rows_of(start, part);
    embedding_backward(kCpu, params, tokens, d_out, part, d_table);
    CHECK(d_table.same_bits(rows_of(whole, part)));
  }
}

TEST_CASE("embedding gives the same bits on two threads") {
  const LookupParams params{0.3f, 4};
  const int64_t width = 515, count = 101;
  REQUIRE(width * count >= 2 * cpu::kMinWorkPerThread);
  HostTensor tokens(DType::kI32, {count});
  for (size_t t = 0; t < tokens.size(); ++t) tokens.set(t, static_cast<double>(t * t % 11));
  const HostTensor table = random_tensor(DType::kBF16, {kVocabulary, width}, 1);
  HostTensor one(DType::kBF16, {count, width}), two = one;
  embedding_forward(kCpu, params, tokens, table, {0, kVocabulary}, one);
  embedding_forward(kTwoThreads, params, tokens, table, {0, kVocabulary}, two);
  CHECK(two.same_bits(one));
  HostTensor d_one = random_tensor(DType::kF32, {kVocabulary, width}, 3), d_two = d_one;
  embedding_backward(kCpu, params, tokens, one, {0, kVocabulary}, d_one);
  embedding_backward(kTwoThreads, params, tokens, one, {0, kVocabulary}, d_two);
  CHECK(d_two.same_bits(d_one));
}

TEST_CASE("embedding of no tokens, on meta, and of wrong operands") {
  const HostTensor none(DType::kI32, {0}), out_none(DType::kF32, {0, 4}), table(DType::kF32, {5, 4});
  embedding_forward(kCpu, {}, none, table, {2, 7}, out_none);
  embedding_backward(kCpu, {}, none, out_none, {2, 7}, table);

  const HostTensor tokens(DType::kI32, {3}), out(DType::kF32, {3, 4}), bf16(DType::kBF16, {5, 4});
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  embedding_forward(kMeta, {}, meta(tokens), meta(table), {0, 5}, meta(out));
  embedding_backward(kMeta, {}, meta(tokens), meta(out), {0, 5}, meta(table));

  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_forward(kCpu, {}, tokens, table, {0, 6}, out);
                            }),
                 "embedding_forward: table is f32 (5, 4), expected f32 (6, 4)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_forward(kCpu, {}, tokens, bf16, {0, 5}, out);
                            }),
                 "table is bf16"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_forward(kCpu, {}, none, table, {0, 5}, out);
                            }),
                 "tokens is i32 (0)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_backward(kCpu, {}, tokens, out, {0, 5}, bf16);
                            }),
                 "d_table is bf16"));
}

}  // namespace
}  // namespace invar::ops
