#include "ops/term_sums.h"

#include <limits>

#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/tree_sum.h"
#include "term_sums_case.h"

namespace invar::ops {
namespace {

using namespace invar::test;

// The definition, an element at a time.
void add_naively(const TermSumsCase& sums, const Tensor& terms, std::span<const Tensor> buffers) {
  for (const TermSumsCase::Vector& vector : sums.vectors) {
    const size_t per_sample = vector.rows.size() / sums.places.size();
    for (int64_t i = 0; i < vector.width; ++i) {
      const auto at = [&](int buffer) -> float& {
        return buffers[static_cast<size_t>(buffer)].data<float>()[vector.into + i];
      };
      for (size_t sample = 0; sample < sums.places.size(); ++sample) {
        const SamplePlace& place = sums.places[sample];
        float sum = 0;
        for (size_t row = 0; row < per_sample; ++row) {
          const float term = terms.data<float>()[vector.rows[sample * per_sample + row] + i];
          sum = row == 0 ? term : sum + term;
        }
        if (place.clears) at(place.buffer) = 0;
        at(place.buffer) += sum;
        for (int join = 0; join < place.joins; ++join) at(place.buffer - join - 1) += at(place.buffer - join);
      }
    }
  }
}

TEST_CASE("add_term_sums adds samples' sums of rows, in the order of rows and places") {
  const auto [samples, needed] = GENERATE(values<std::pair<int64_t, int>>({{1, 2}, {4, 3}, {9, 3}, {11, 4}, {300, 1}}));
  CAPTURE(samples);
  const TermSumsCase sums = term_sums_case(samples);
  CHECK(buffers_needed(sums.places) == needed);
  HostTensor rows(DType::kI64, {sums.table.packed_size()});
  std::ranges::copy(sums.table.packed(), rows.tensor().data<int64_t>());
  const HostTensor terms = random_tensor(DType::kF32, {sums.terms}, 1);
  for (const int threads : {1, 2, 3}) {
    std::vector<HostTensor> actual, expected;
    std::vector<Tensor> actual_buffers, expected_buffers;
    for (int buffer = 0; buffer < 4; ++buffer) {
      actual.push_back(random_tensor(DType::kF32, {sums.elements}, static_cast<unsigned>(buffer) + 2));
      expected.push_back(actual.back());
    }
    for (size_t buffer = 0; buffer < actual.size(); ++buffer) {
      actual_buffers.push_back(actual[buffer]);
      expected_buffers.push_back(expected[buffer]);
    }
    add_naively(sums, terms, expected_buffers);
    actual_buffers.resize(static_cast<size_t>(needed));
    add_term_sums(Stream(DeviceType::kCpu, threads), sums.table, rows, terms, {sums.places, actual_buffers});
    for (size_t buffer = 0; buffer < actual_buffers.size(); ++buffer) {
      CHECK(actual[buffer].same_bits(expected[buffer]));
    }
  }
}

// Of workers of one or two samples, the first sums of a tree of eight; a sample that is added at once.
const std::vector<SamplePlace> kPlaces = {{1, true, 0}, {1, false, 0}, {2, true, 0},  {2, false, 1}, {2, true, 0},
                                          {3, true, 0}, {3, false, 2}, {1, false, 1}, {1, true, 0},  {2, true, 0}};

TEST_CASE("add_terms adds a term of each sample, as places say") {
  const int64_t n = GENERATE(1, 5, 256, 1030), first = GENERATE(0, 1, 4);
  const std::vector<SamplePlace> places(kPlaces.begin() + first, kPlaces.end());
  const int64_t samples = std::ssize(places);
  const HostTensor terms = random_tensor(DType::kF32, {samples, n}, 1);
  std::vector<HostTensor> before, expected;
  for (unsigned buffer = 0; buffer < 4; ++buffer) {
    before.push_back(random_tensor(DType::kF32, {n}, buffer + 2));
    expected.push_back(before.back());
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto at = [&](int buffer) -> float& {
      return expected[static_cast<size_t>(buffer)].tensor().data<float>()[i];
    };
    for (int64_t s = 0; s < samples; ++s) {
      const SamplePlace& place = places[static_cast<size_t>(s)];
      if (place.clears) at(place.buffer) = 0;
      at(place.buffer) += terms.tensor().data<float>()[s * n + i];
      for (int join = 0; join < place.joins; ++join) at(place.buffer - join - 1) += at(place.buffer - join);
    }
  }
  for (const int threads : {1, 2, 3}) {
    std::vector<HostTensor> sums(before);
    std::vector<Tensor> buffers;
    for (HostTensor& sum : sums) buffers.push_back(sum);
    add_terms(Stream(DeviceType::kCpu, threads), terms, {places, buffers});
    for (size_t buffer = 0; buffer < 3; ++buffer) CHECK(sums[buffer].same_bits(expected[buffer]));  // 3 was joined
  }
}

TEST_CASE("add_terms: a sum begins with +0, and wrong operands are refused") {
  std::vector<float> terms = {-0.0f, -0.0f}, first = {3}, second = {5};
  const std::vector<Tensor> buffers = {view_of(first), view_of(second)};
  const Tensor two = view_of(terms).view({2, 1});
  add_terms(kCpu, two, {{{1, true, 0}, {1, false, 0}}, buffers});
  CHECK((first[0] == 3 && second[0] == 0 && !std::signbit(second[0])));

  const auto refused = [&](const Tensor& of, const std::vector<SamplePlace>& places, const std::vector<Tensor>& into) {
    return message_of(ErrorKind::kFault, [&] { add_terms(kCpu, of, {places, into}); });
  };
  CHECK(contains(refused(two, {{0, false, 0}}, buffers), "add_terms: 1 places of 2 samples"));
  CHECK(contains(refused(two, {{0, false, 0}, {1, false, 0}}, buffers),
                 "a sample adds to buffer 1 after one in buffer 0"));
  CHECK(contains(refused(two, {{1, false, 1}, {1, false, 0}}, buffers),
                 "a sample adds to buffer 1 after one in buffer 0"));
  CHECK(
      contains(refused(two, {{1, true, 0}, {1, true, 0}}, buffers), "a sample clears buffer 1 after one in buffer 1"));
  CHECK(contains(refused(two, {{0, false, 0}, {1, true, 2}}, buffers), "2 joins from buffer 1 of 24"));
  CHECK(contains(refused(two, {{1, true, 0}, {2, true, 0}}, buffers), "2 buffers, 3 are needed, at most 24 taken"));
  CHECK(contains(refused(two, {{0, false, 0}, {0, false, 0}}, {two}), "a buffer is f32 (2, 1), a term of 1 elements"));
}

// One vector of one element with two rows in each of two samples.
struct Small {
  explicit Small(const std::vector<int64_t>& order) { table.add(1, 1, order); }
  float sum(std::vector<float> terms, const std::vector<SamplePlace>& places, float before = 5) {
    std::vector<float> first = {7, before, 7}, second = {7, 9, 7};
    const std::vector<Tensor> buffers = {view_of(first), view_of(second)};
    std::vector<int64_t> packed = table.packed();
    add_term_sums(kCpu, table, view_of(packed), view_of(terms), {places, buffers});
    CHECK((first[0] == 7 && first[2] == 7 && second[0] == 7 && second[2] == 7));
    return first[1];
  }
  TermTable table{2};
};

TEST_CASE("add_term_sums: which additions there are, told by what they lose") {
  constexpr float kLarge = 0x1p24f, kOne = 1.0f;
  const std::vector<SamplePlace> chain = {{0, true, 0}, {0, false, 0}}, tree = {{0, true, 0}, {1, true, 1}};
  // (L + 1) + (1 − L): 1 is lost in each; in the other order of rows none is.
  CHECK(Small({0, 1, 2, 3}).sum({kLarge, kOne, kOne, -kLarge}, chain) == 1);
  CHECK(Small({0, 3, 1, 2}).sum({kLarge, kOne, kOne, -kLarge}, chain) == 2);
  // A sample goes on where the one before ended, or begins at zero.
  CHECK(Small({0, 1, 2, 3}).sum({1, 2, 3, 4}, {{0, false, 0}, {0, false, 0}}, 100) == 110);
  CHECK(Small({0, 1, 2, 3}).sum({1, 2, 3, 4}, {{0, true, 0}, {0, false, 0}}, 100) == 10);
  CHECK(Small({0, 1, 2, 3}).sum({1, 2, 3, 4}, {{1, true, 1}, {0, false, 0}}, 100) == 110);
  CHECK(Small({0, 1, 2, 3}).sum({1, 2, 3, 4}, tree, 100) == 10);
  const float zero = Small({0, 1, 2, 3}).sum({-0.0f, -0.0f, -0.0f, -0.0f}, chain);
  CHECK((zero == 0 && !std::signbit(zero)));  // a sum begins with +0
}

TEST_CASE("samples need buffers for sums begun before them and for those that they leave") {
  const auto needed = [](const std::vector<SamplePlace>& places) { return buffers_needed(places); };
  CHECK(needed({{0, false, 0}}) == 1);
  CHECK(needed({{2, false, 0}}) == 3);
  CHECK(needed({{2, true, 0}}) == 3);
  CHECK(needed({{2, true, 2}}) == 2);  // the one below is joined, then the first
  CHECK(needed({{2, false, 2}}) == 3);
  CHECK(needed({{1, true, 0}, {2, true, 0}, {3, true, 2}}) == 2);
  CHECK(needed({{1, true, 0}, {2, true, 0}, {3, true, 3}}) == 1);
  CHECK(needed({{3, true, 1}, {2, false, 2}, {1, true, 0}}) == 3);
}

TEST_CASE("add_term_sums of nothing, on meta, and of wrong operands") {
  const HostTensor terms(DType::kF32, {8}), buffer(DType::kF32, {4}), doubles(DType::kF64, {4});
  const std::vector<SamplePlace> places = {{0, true, 0}, {0, false, 0}};
  std::vector<int64_t> none;
  const std::vector<Tensor> one = {buffer};
  add_term_sums(kCpu, TermTable(2), Tensor(none.data(), DType::kI64, DeviceType::kCpu, {0}), terms, {places, one});

  Small small({0, 1, 2, 7});
  std::vector<int64_t> entries = small.table.packed();
  const Tensor packed = view_of(entries);
  const auto on_meta = [](const Tensor& x) { return Tensor(nullptr, x.dtype(), DeviceType::kMeta, x.shape()); };
  const std::vector<Tensor> meta = {on_meta(buffer)};
  add_term_sums(kMeta, small.table, on_meta(packed), on_meta(terms), {places, meta});

  const auto refused = [&](const Tensor& rows, const Tensor& of, const std::vector<SamplePlace>& at,
                           const std::vector<Tensor>& into) {
    return message_of(ErrorKind::kFault, [&] { add_term_sums(kCpu, small.table, rows, of, {at, into}); });
  };
  CHECK(contains(refused(packed.rows(1, 8), terms, places, one), "packed is i64 (7), expected i64 (8)"));
  CHECK(contains(refused(packed, terms.tensor().rows(0, 7), places, one),
                 "terms is f32 (7), expected f32 of 8 elements or more"));
  CHECK(contains(refused(packed, terms, {{0, true, 0}}, one), "1 places of 2 samples"));
  CHECK(contains(refused(packed, terms, places, {}), "0 buffers, 1 are needed, at most 24 taken"));
  CHECK(contains(refused(packed, terms, {{0, false, 0}, {1, true, 0}}, one), "1 buffers, 2 are needed"));
  CHECK(contains(refused(packed, terms, places, std::vector<Tensor>(25, buffer)),
                 "25 buffers, 1 are needed, at most 24 taken"));
  CHECK(contains(refused(packed, terms, places, {buffer.tensor().rows(0, 1)}),
                 "a buffer is f32 (1), expected f32 of 2 elements or more"));
  CHECK(contains(refused(packed, terms, places, {doubles}), "a buffer is f64 (4)"));
  CHECK(contains(refused(packed, terms, places, {buffer, on_meta(buffer)}), "on meta, but the stream is on cpu"));
  CHECK(contains(refused(packed, terms, {{0, true, 1}, {0, true, 0}}, one), "1 joins from buffer 0 of 24"));
  CHECK(contains(refused(packed, terms, {{0, true, -1}, {1, false, 0}}, one), "-1 joins from buffer 0 of 24"));
  CHECK(contains(refused(packed, terms, {{0, true, 0}, {24, true, 0}}, one), "0 joins from buffer 24 of 24"));
  CHECK(contains(refused(packed, terms, {{0, true, 0}, {0, true, 0}}, one),
                 "a sample clears buffer 0 after one in buffer 0"));

  TermTable rows(2);
  const std::vector<int64_t> three = {0, 1, 2}, before = {0, -1};
  CHECK(contains(message_of(ErrorKind::kFault, [&] { rows.add(1, 0, three); }), "3 rows of 2 samples"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { rows.add(1, 0, none); }), "0 rows of 2 samples"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { rows.add(1, 0, before); }), "1 elements at 0"));
}

}  // namespace
}  // namespace invar::ops
