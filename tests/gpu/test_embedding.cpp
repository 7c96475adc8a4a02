#include <bit>
#include <list>

#include "device_tensor.h"
#include "ops/embedding.h"

namespace invar::ops {
namespace {

using namespace invar::test;

const Stream kThreads(DeviceType::kCpu, 8);

// Tokens of which one in three is token 3, as in text where a few words are everywhere.
HostTensor random_tokens(int64_t count, int64_t vocabulary_size, unsigned seed) {
  std::mt19937 generator(seed);
  HostTensor tokens(DType::kI32, {count});
  for (size_t t = 0; t < tokens.size(); ++t) {
    const auto token = static_cast<int64_t>(generator()) % vocabulary_size;
    tokens.set(t, static_cast<double>(generator() % 3 == 0 ? std::min<int64_t>(3, vocabulary_size - 1) : token));
  }
  return tokens;
}

struct Size {
  int64_t count, vocabulary_size, width;
};

Size any_size() {
  return GENERATE(values<Size>({{0, 11, 8},
                                {1, 11, 1},
                                {7, 11, 19},
                                {100, 8, 20},
                                {300, 1, 24},
                                {500, 70, 72},
                                {1000, 5000, 33},
                                {4096, 3000, 1024},
                                {600, 500, 2560}}));
}

TEST_CASE("embedding_forward on the GPU has the CPU's bits") {
  const auto [count, vocabulary_size, width] = any_size();
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const LookupParams params{GENERATE(1.0f, 50.5f)};
  const int64_t begin = GENERATE(0, 1);  // 1: rank of an odd part of the vocabulary
  const Range part = begin == 0 ? Range{0, vocabulary_size} : Range{vocabulary_size / 3, vocabulary_size - 1};
  if (part.size() < 0) return;
  CAPTURE(count, vocabulary_size, width, name_of(dtype), part.begin, part.end);
  const HostTensor tokens = random_tokens(count, vocabulary_size, 1);
  HostTensor table = random_tensor(dtype, {part.size(), width}, 2), out(dtype, {count, width});
  for (size_t i = 0; i < table.size(); i += 5) table.set(i, -0.0);
  const DeviceTensor device_out(out);
  embedding_forward(kThreads, params, tokens, table, part, out);
  embedding_forward(gpu(), params, DeviceTensor(tokens), DeviceTensor(table), part, device_out);
  CHECK(device_out.host().same_bits(out));
}

TEST_CASE("embedding_backward on the GPU has the CPU's bits") {
  const auto [count, vocabulary_size, width] = any_size();
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const LookupParams params{GENERATE(1.0f, 0.7f), GENERATE(-1, 3, 5)};
  const int64_t begin = GENERATE(0, 1);
  const Range part = begin == 0 ? Range{0, vocabulary_size} : Range{vocabulary_size / 3, vocabulary_size - 1};
  if (part.size() < 0) return;
  CAPTURE(count, vocabulary_size, width, name_of(dtype), params.frozen_token, part.begin, part.end);
  const HostTensor tokens = random_tokens(count, vocabulary_size, 1);
  const HostTensor d_out = random_tensor(dtype, {count, width}, 2);
  HostTensor d_table = random_tensor(DType::kF32, {part.size(), width}, 3);
  const DeviceTensor device_table(d_table);
  embedding_backward(kThreads, params, tokens, d_out, part, d_table.tensor());
  embedding_backward(gpu(), params, DeviceTensor(tokens), DeviceTensor(d_out), part, device_table.tensor());
  CHECK(device_table.host().same_bits(d_table));
}

// Places of so many samples: workers of two, whose sums a tree adds to the first buffer; then some are left.
std::vector<SamplePlace> tree_places(int64_t samples) {
  std::vector<SamplePlace> places;
  for (unsigned sample = 0; sample < samples; ++sample) {
    const unsigned worker = sample / 2;
    const int buffer = std::popcount(worker), joins = sample % 2 == 0 ? 0 : std::countr_one(worker);
    places.push_back({buffer, sample % 2 == 0 && worker > 0, std::min(buffer, joins)});
  }
  return places;
}

TEST_CASE("embedding_backward of samples on the GPU has the CPU's bits, in the rows that they look up") {
  struct Case {
    int64_t samples, first, length, vocabulary_size, width;  // from sample `first` on
  };
  const auto [samples, first, length, vocabulary_size, width] =
      GENERATE(values<Case>({{1, 0, 7, 11, 19},
                             {1, 0, 64, 1, 24},  // a row of whole batches, which ends with a sample
                             {4, 0, 32, 1, 24},
                             {4, 0, 48, 1, 19},
                             {2, 0, 50, 8, 20},
                             {4, 0, 100, 300, 24},
                             {4, 3, 64, 70, 72},
                             {15, 0, 40, 5000, 33},
                             {16, 5, 40, 50, 260},
                             {8, 4, 512, 3000, 1024},
                             {896, 0, 3, 40, 16},
                             {895, 127, 3, 40, 16}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const LookupParams params{1.7f, GENERATE(-1, 3)};
  const int64_t blocks = GENERATE(1, 4);  // of columns; 1: a plain table
  const int64_t begin = GENERATE(0, 1);   // of a plain table's part of the vocabulary
  if (begin >= vocabulary_size || (begin > 0 && blocks > 1)) return;
  CAPTURE(samples, first, length, vocabulary_size, width, name_of(dtype), params.frozen_token, blocks);
  std::vector<SamplePlace> places = tree_places(samples);
  places.erase(places.begin(), places.begin() + first);
  const int64_t count = length * std::ssize(places);
  const HostTensor tokens = random_tokens(count, vocabulary_size, 1);
  const HostTensor d_out = random_tensor(dtype, {count, blocks * width}, 2);
  const DeviceTensor device_tokens(tokens), device_d_out(d_out);
  std::vector<HostTensor> expected;
  std::list<DeviceTensor> actual;
  std::vector<Tensor> device_buffers;
  for (int buffer = 0; buffer < buffers_needed(places); ++buffer) {
    const auto seed = static_cast<unsigned>(buffer) + 3;
    expected.push_back(blocks == 1 ? random_tensor(DType::kF32, {vocabulary_size - begin, width}, seed)
                                   : random_tensor(DType::kF32, {blocks, vocabulary_size * width}, seed));
    device_buffers.push_back(actual.emplace_back(expected.back()).tensor());
  }
  const SampleSums sums(places, {expected.begin(), expected.end()}), device_sums(places, device_buffers);
  if (blocks == 1) {
    embedding_backward(kThreads, params, tokens, d_out, {begin, vocabulary_size}, sums);
    embedding_backward(gpu(), params, device_tokens, device_d_out, {begin, vocabulary_size}, device_sums);
  } else {
    column_embedding_backward(kThreads, params, tokens, d_out, width, sums);
    column_embedding_backward(gpu(), params, device_tokens, device_d_out, width, device_sums);
  }
  auto next = actual.begin();
  for (int buffer = 0; buffer <= places.back().buffer - places.back().joins; ++buffer) {
    CHECK((next++)->host().same_bits(expected[static_cast<size_t>(buffer)]));
  }
}

TEST_CASE("embedding on the GPU of views at any alignment") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t width = GENERATE(1, 3, 6, 12), count = 50;
  const HostTensor tokens = random_tokens(count, 9, 1);
  const HostTensor table = random_tensor(dtype, {10, width}, 2), d_out = random_tensor(dtype, {count + 1, width}, 3);
  HostTensor out(dtype, {count + 1, width}), d_table = random_tensor(DType::kF32, {10, width}, 4);
  const DeviceTensor device_out(out), device_d_table(d_table);
  const auto run = [&](const Stream& stream, const Tensor& ids, const Tensor& rows, const Tensor& y, const Tensor& d_y,
                       const Tensor& d_rows) {
    embedding_forward(stream, {0.3f}, ids, rows.rows(1, 10), {0, 9}, y.rows(1, count + 1));
    embedding_backward(stream, {0.3f}, ids, d_y.rows(1, count + 1), {0, 9}, d_rows.rows(1, 10));
  };
  run(gpu(), DeviceTensor(tokens), DeviceTensor(table), device_out, DeviceTensor(d_out), device_d_table);
  run(kCpu, tokens, table, out, d_out, d_table);
  CHECK(device_out.host().same_bits(out));
  CHECK(device_d_table.host().same_bits(d_table));
}

TEST_CASE("column embeddings on the GPU have the CPU's bits") {
  struct Columns {
    int64_t count, vocabulary_size, blocks, block;
  };
  const auto [count, vocabulary_size, blocks, block] = GENERATE(values<Columns>(
      {{0, 5, 2, 8}, {1, 1, 1, 1}, {40, 11, 3, 5}, {40, 11, 3, 12}, {333, 100, 7, 64}, {1024, 200, 35, 256}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const LookupParams params{0.7f, GENERATE(-1, 3)};
  CAPTURE(count, vocabulary_size, blocks, block, name_of(dtype), params.frozen_token);
  const HostTensor tokens = random_tokens(count, vocabulary_size, 1);
  const HostTensor table = random_tensor(dtype, {blocks, vocabulary_size * block}, 2);
  const HostTensor d_out = random_tensor(dtype, {count, blocks * block}, 3);
  HostTensor out(dtype, {count, blocks * block});
  HostTensor d_table = random_tensor(DType::kF32, {blocks, vocabulary_size * block}, 4);
  const DeviceTensor device_tokens(tokens), device_out(out), device_d_table(d_table);
  column_embedding_forward(kThreads, params, tokens, table, block, out);
  column_embedding_forward(gpu(), params, device_tokens, DeviceTensor(table), block, device_out);
  CHECK(device_out.host().same_bits(out));
  column_embedding_backward(kThreads, params, tokens, d_out, block, d_table.tensor());
  column_embedding_backward(gpu(), params, device_tokens, DeviceTensor(d_out), block, device_d_table.tensor());
  CHECK(device_d_table.host().same_bits(d_table));
}

}  // namespace
}  // namespace invar::ops
