#include <cmath>

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
  embedding_backward(kCpu, {}, tokens, d_out, {0, kVocabulary}, whole.tensor());

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
    embedding_backward(kCpu, {}, tokens, d_out, part, d_table.tensor());
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
  embedding_backward(kCpu, params, tokens, d_out, {0, kVocabulary}, whole.tensor());
  require_close(whole.values(), expected, 2e-6, 2e-6);
  if (frozen >= 0) CHECK(rows_of(whole, {frozen, frozen + 1}).same_bits(rows_of(start, {frozen, frozen + 1})));

  for (const Range part : {Range{0, 3}, Range{3, 11}}) {  // the token's number counts, not its row
    HostTensor d_table = rows_of(start, part);
    embedding_backward(kCpu, params, tokens, d_out, part, d_table.tensor());
    CHECK(d_table.same_bits(rows_of(whole, part)));
  }
}

TEST_CASE("embedding_backward of samples adds each one's tokens as its place says, in the rows that they look up") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(3, 515), count = 21;
  // Of sums begun before the first and left after the last; sums that begin and end here, of which there are no
  // buffers.
  const auto places = GENERATE(values<std::vector<SamplePlace>>({
      {{1, false, 0}, {2, true, 1}, {2, true, 0}},
      {{1, true, 0}, {2, true, 0}, {3, true, 3}},
      {{0, false, 0}, {1, true, 0}, {2, true, 1}, {2, true, 0}, {3, true, 2}, {1, false, 0}, {2, true, 1}},
      {{2, false, 2}},
  }));
  const LookupParams params{1.7f, 4};
  HostTensor tokens(DType::kI32, {count});
  for (size_t t = 0; t < tokens.size(); ++t) tokens.set(t, static_cast<double>(t * t % 7));  // 0, 1, 2, 4 of 11
  const HostTensor d_out = random_tensor(dtype, {count, width}, 2);
  std::vector<HostTensor> before, after;
  for (int buffer = 0; buffer < 4; ++buffer) {
    before.push_back(random_tensor(DType::kF32, {kVocabulary, width}, static_cast<unsigned>(buffer) + 3));
  }
  std::vector<HostTensor> expected = before;
  for (const int row : {0, 1, 2}) {
    for (int64_t c = 0; c < width; ++c) {
      const auto at = [&](int buffer) -> float& {
        return expected[static_cast<size_t>(buffer)].tensor().data<float>()[row * width + c];
      };
      int64_t t = 0;
      for (size_t sample = 0; sample < places.size(); ++sample) {
        const SamplePlace& place = places[sample];
        if (place.clears) at(place.buffer) = 0;
        for (; t < static_cast<int64_t>(sample + 1) * count / std::ssize(places); ++t) {
          if (static_cast<int>(tokens[static_cast<size_t>(t)]) != row) continue;
          at(place.buffer) =
              std::fma(1.7f, static_cast<float>(d_out[static_cast<size_t>(t * width + c)]), at(place.buffer));
        }
        for (int join = 0; join < place.joins; ++join) at(place.buffer - join - 1) += at(place.buffer - join);
      }
    }
  }
  const auto needed = static_cast<size_t>(buffers_needed(places));
  const auto live = static_cast<size_t>(places.back().buffer - places.back().joins) + 1;
  for (const Stream& stream : {kCpu, kTwoThreads}) {
    std::vector<HostTensor> sums(before.begin(), before.begin() + static_cast<int64_t>(needed));
    embedding_backward(stream, params, tokens, d_out, {0, kVocabulary}, {places, {sums.begin(), sums.end()}});
    for (size_t buffer = 0; buffer < live; ++buffer) CHECK(sums[buffer].same_bits(expected[buffer]));
    for (size_t buffer = live; buffer < needed; ++buffer) {  // joined: as it was in the rows of others
      for (size_t i = 3 * static_cast<size_t>(width); i < sums[buffer].size(); ++i) {
        CHECK(sums[buffer][i] == before[buffer][i]);
      }
    }
  }
  for (const Range part : {Range{0, 2}, Range{2, 11}}) {
    std::vector<HostTensor> sums;
    for (size_t buffer = 0; buffer < needed; ++buffer) sums.push_back(rows_of(before[buffer], part));
    embedding_backward(kCpu, params, tokens, d_out, part, {places, {sums.begin(), sums.end()}});
    for (size_t buffer = 0; buffer < live; ++buffer) CHECK(sums[buffer].same_bits(rows_of(expected[buffer], part)));
  }
}

TEST_CASE("embedding_backward of samples: one after another is not as one") {
  const int64_t count = 6;
  const HostTensor tokens(DType::kI32, {count}, Values(6, 2.0));
  const HostTensor d_out(DType::kF32, {count, 1}, Values{0x1p24, 1, 1, 1, 1, 1});  // each 1 is lost beside the first
  const auto sum = [&](const std::vector<SamplePlace>& places) {
    const HostTensor d_table(DType::kF32, {3, 1}, Values(3, 0.0));
    embedding_backward(kCpu, {}, tokens, d_out, {0, 3}, {places, {d_table}});
    return d_table[2];
  };
  CHECK(sum({{0, false, 0}}) == 0x1p24);
  CHECK(sum({{0, false, 0}, {0, false, 0}}) == 0x1p24);
  CHECK(sum({{0, false, 0}, {1, true, 1}}) == 0x1p24 + 4);                // 3, to even
  CHECK(sum({{0, false, 0}, {1, true, 0}, {2, true, 2}}) == 0x1p24 + 4);  // 2 + 2
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
  embedding_backward(kCpu, params, tokens, one, {0, kVocabulary}, d_one.tensor());
  embedding_backward(kTwoThreads, params, tokens, one, {0, kVocabulary}, d_two.tensor());
  CHECK(d_two.same_bits(d_one));
}

TEST_CASE("embedding of no tokens, on meta, and of wrong operands") {
  const HostTensor none(DType::kI32, {0}), out_none(DType::kF32, {0, 4}), table(DType::kF32, {5, 4});
  embedding_forward(kCpu, {}, none, table, {2, 7}, out_none);
  embedding_backward(kCpu, {}, none, out_none, {2, 7}, table.tensor());

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
  const auto refused = [&](const SampleSums& sums) {
    return message_of(ErrorKind::kFault, [&] { embedding_backward(kCpu, {}, tokens, out, {0, 5}, sums); });
  };
  CHECK(contains(refused(bf16.tensor()), "d_table is bf16"));
  CHECK(contains(refused({{{}, {}}, {table}}), "embedding_backward: 3 tokens of 2 samples"));
  const SampleSums three({{}, {}, {}}, {table});  // a product could be rounded to −0
  embedding_backward(kCpu, {1.0f}, tokens, out, {0, 5}, three);
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_backward(kCpu, {0.9f}, tokens, out, {0, 5}, three);
                            }),
                 "samples are scaled by 0.9"));
  embedding_backward(kCpu, {0.9f}, tokens, out, {0, 5}, {{{0, false, 0}}, {table}});
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              embedding_backward(kCpu, {0.9f}, tokens, out, {0, 5}, {{{0, true, 0}}, {table}});
                            }),
                 "samples are scaled by 0.9"));
  CHECK(contains(refused({{}, {table}}), "0 places of 0 samples"));
  CHECK(contains(refused({std::vector<SamplePlace>(897), {table}}), "897 places of 897 samples, at most 896"));
  CHECK(contains(refused({{{1, true, 0}}, {table}}), "1 buffers, 2 are needed"));
  CHECK(contains(refused({{{0, true, 0}}, {table, bf16}}), "d_table is bf16"));
  CHECK(contains(refused({{{0, true, 0}}, {table, meta(table)}}), "on meta, but the stream is on cpu"));
}

}  // namespace
}  // namespace invar::ops
