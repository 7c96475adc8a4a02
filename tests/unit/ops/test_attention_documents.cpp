// Samples of several documents.
#include "attention_case.h"

namespace invar::test {
namespace {

using ops::AttentionBackend;
using ops::reference_attention;

constexpr int64_t kTile = 96;  // of tiled attention
constexpr int64_t kSequence = 3 * kTile + 12;

// Lengths of the documents of one sample.
using Division = std::vector<int64_t>;

Division equal_documents(int64_t length, int64_t sequence) {
  return Division(static_cast<size_t>(sequence / length), length);
}

const std::vector<Division> kDivisions = {
    {kSequence},
    {kTile, kTile, kTile, 12},                 // on the borders of tiles
    {kTile - 1, 1, 1, kTile - 1, kTile + 12},  // of one token beside a border
    {50, 200, 50},                             // across tiles
    {1, kSequence - 1},
    {kSequence - 1, 1},
    {2 * kTile, kTile + 12},
    equal_documents(3, kSequence),
    equal_documents(1, kSequence),
};

HostTensor starts_of(const std::vector<Division>& samples) {
  std::vector<double> starts;
  for (const Division& sample : samples) {
    double start = 0;
    for (const int64_t length : sample) {
      starts.insert(starts.end(), static_cast<size_t>(length), start);
      start += static_cast<double>(length);
    }
  }
  return HostTensor(DType::kI32, {std::ssize(starts)}, starts);
}

// Every division beside the next one, in a call of two samples.
std::vector<std::vector<Division>> pairs_of_divisions() {
  std::vector<std::vector<Division>> pairs;
  for (size_t i = 0; i < kDivisions.size(); ++i)
    pairs.push_back({kDivisions[i], kDivisions[(i + 1) % kDivisions.size()]});
  return pairs;
}

AttentionResult run_documents(const AttentionBackend& backend, const AttentionShape& shape, DType dtype,
                              const HostTensor& starts, int threads = 1) {
  AttentionCase c(shape, dtype);
  c.params.document_starts = starts;
  const AttentionResult result = run_attention(backend, c, threads);
  CHECK(c.unused_untouched());
  return result;
}

void append(AttentionResult& all, const AttentionResult& part) {
  const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  add(all.out, part.out), add(all.lse, part.lse), add(all.d_q, part.d_q), add(all.d_k, part.d_k),
      add(all.d_v, part.d_v);
}

// Each document in a call of its own.
AttentionResult run_alone(const AttentionBackend& backend, const AttentionShape& shape, DType dtype,
                          const std::vector<Division>& samples) {
  AttentionCase c(shape, dtype);
  AttentionResult all;
  int64_t begin = 0;
  for (const Division& sample : samples) {
    for (const int64_t length : sample) {
      append(all, run_attention(backend, c.alone(begin, begin + length)));
      begin += length;
    }
  }
  return all;
}

TEST_CASE("the reference gives a document in a sample the bits that it has alone") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const int64_t window : {0, 4}) {
    const AttentionShape shape{2, 20, 2, 2, 8, window};
    const std::vector<Division> samples = {{7, 1, 9, 3}, {20}};
    const HostTensor starts = starts_of(samples);
    const AttentionResult packed = run_documents(reference_attention(), shape, dtype, starts);
    CHECK(same_bits(packed, run_alone(reference_attention(), shape, dtype, samples)));
    AttentionCase whole(shape, dtype);
    CHECK(worst_error(packed, run_attention(reference_attention(), whole)) > 0.1);
  }
}

TEST_CASE("tiled attention equals the reference over documents") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const std::vector<Division>& samples : pairs_of_divisions()) {
    const HostTensor starts = starts_of(samples);
    for (const int64_t window : {0, 1, 7, 64, 150}) {
      const AttentionShape shape{2, kSequence, 2, 2, 12, window};
      const AttentionResult actual = run_documents(tiled(), shape, dtype, starts);
      const AttentionResult expected = run_documents(reference_attention(), shape, dtype, starts);
      INFO("documents of " << samples[0].front() << " and " << samples[1].front() << " window " << window);
      CHECK(worst_error(actual, expected) < (dtype == DType::kF32 ? 1e-5 : 0x1p-6));
    }
  }
}

TEST_CASE("a document that begins a token early or late is seen") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const AttentionShape shape{1, kSequence, 1, 2, 12};
  const AttentionResult expected =
      run_documents(reference_attention(), shape, dtype, starts_of({{kTile, kSequence - kTile}}));
  for (const int64_t wrong : {kTile - 1, kTile + 1}) {
    const AttentionResult actual = run_documents(tiled(), shape, dtype, starts_of({{wrong, kSequence - wrong}}));
    CHECK(worst_error(actual, expected) > 0.03);
  }
}

TEST_CASE("a document that begins with a tile has the bits that it has alone, whatever is before it") {
  for (const int64_t window : {0, 70}) {
    const AttentionShape shape{2, kSequence, 1, 2, 16, window};
    const std::vector<Division> samples = {{kTile, 2 * kTile, 12}, {2 * kTile, kTile + 12}};
    const AttentionResult alone = run_alone(tiled(), shape, DType::kF32, samples);
    for (const int threads : {1, 2, 7}) {
      CHECK(same_bits(run_documents(tiled(), shape, DType::kF32, starts_of(samples), threads), alone));
    }
    AttentionCase poisoned(shape, DType::kF32);
    const HostTensor starts = starts_of(samples);
    poisoned.params.document_starts = starts;
    const AttentionOperands first = poisoned.alone(0, kTile);
    for (const ops::HeadView* view : {&first.q, &first.k, &first.v, &first.d_out}) {
      AttentionCase::write(*view, std::vector<double>(static_cast<size_t>(AttentionCase::count(*view)), NAN));
    }
    const AttentionResult result = run_attention(tiled(), poisoned);
    const auto others = [](const std::vector<double>& values) {
      const auto row = static_cast<std::ptrdiff_t>(values.size()) / (2 * kSequence);
      return std::vector<double>(values.begin() + kTile * row, values.end());
    };
    CHECK(std::isnan(result.out.front()));
    CHECK(same_bits(others(result.out), others(alone.out)));
    CHECK(same_bits(others(result.d_q), others(alone.d_q)));
    CHECK(same_bits(others(result.d_k), others(alone.d_k)));
    CHECK(same_bits(others(result.d_v), others(alone.d_v)));
  }
}

TEST_CASE("one document per sample has the bits of none being told") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const int64_t window : {0, 70}) {
    const AttentionShape shape{2, kSequence, 2, 2, 24, window};
    AttentionCase none(shape, dtype);
    CHECK(same_bits(run_documents(tiled(), shape, dtype, starts_of({{kSequence}, {kSequence}})),
                    run_attention(tiled(), none)));
  }
}

TEST_CASE("bits over documents do not depend on the number of threads") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const int64_t window : {0, 70}) {
    const AttentionShape shape{2, kSequence, 2, 2, 24, window};
    const HostTensor starts = starts_of({kDivisions[2], kDivisions[3]});
    const AttentionResult expected = run_documents(tiled(), shape, dtype, starts, 1);
    for (const int threads : {2, 3, 4, 7}) {
      CHECK(same_bits(run_documents(tiled(), shape, dtype, starts, threads), expected));
    }
  }
}

TEST_CASE("document starts that do not fit the call are faults") {
  AttentionCase c({2, 4, 2, 2, 8}, DType::kF32);
  HostTensor lse(DType::kF32, {8, 4});
  const auto forward = [&](const Tensor& starts) {
    c.params.document_starts = starts;
    return message_of(ErrorKind::kFault,
                      [&] { tiled().forward(Stream(DeviceType::kCpu), c.params, c.q, c.k, c.v, c.out, lse); });
  };
  const HostTensor starts = starts_of({{4}, {1, 3}});
  CHECK(forward(starts).empty());
  CHECK(
      contains(forward(starts.tensor().rows(0, 4)), "attention_forward: document_starts is i32 (4), expected i32 (8)"));
  CHECK(contains(forward(HostTensor(DType::kF32, {8})), "document_starts is f32 (8)"));
  CHECK(contains(forward(starts.on(DeviceType::kMeta)), "i32 (8) on meta"));
}

}  // namespace
}  // namespace invar::test
