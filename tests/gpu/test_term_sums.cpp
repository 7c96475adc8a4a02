#include "ops/term_sums.h"

#include <bit>
#include <list>

#include "like_cpu.h"
#include "term_sums_case.h"

namespace invar::ops {
namespace {

using namespace invar::test;

TEST_CASE("add_term_sums on the GPU gives the CPU's bits, in the buffers that it needs") {
  const TermSumsCase sums = term_sums_case(GENERATE(1, 9, 11, 12, 129, 300));
  HostTensor rows(DType::kI64, {sums.table.packed_size()});
  std::ranges::copy(sums.table.packed(), rows.tensor().data<int64_t>());
  const HostTensor terms = random_tensor(DType::kF32, {sums.terms}, 1);
  const DeviceTensor device_rows(rows), device_terms(terms);
  std::vector<HostTensor> expected;
  std::list<DeviceTensor> actual;
  std::vector<Tensor> buffers, device_buffers;
  for (int buffer = 0; buffer < buffers_needed(sums.places); ++buffer) {
    expected.push_back(random_tensor(DType::kF32, {sums.elements}, static_cast<unsigned>(buffer) + 2));
    device_buffers.push_back(actual.emplace_back(expected.back()));
  }
  for (const HostTensor& buffer : expected) buffers.push_back(buffer);
  add_term_sums(kCpu, sums.table, rows, terms, {sums.places, buffers});
  add_term_sums(gpu(), sums.table, device_rows, device_terms, {sums.places, device_buffers});
  auto next = actual.begin();
  for (const HostTensor& buffer : expected) CHECK((next++)->host().same_bits(buffer));
}

// The samples [begin, end) of workers of `own` samples each, 1 << height of them, whose sums a tree adds; at once: a
// worker of one sample adds it to its sibling's sum.
std::vector<SamplePlace> tree_places(int height, int own, bool at_once, int64_t begin, int64_t end) {
  std::vector<SamplePlace> places;
  for (unsigned worker = 0; worker < 1u << height; ++worker) {
    const int buffer = std::popcount(worker), joins = std::countr_one(worker);
    const int early = at_once && joins > 0 ? 1 : 0;
    for (int sample = 0; sample < own; ++sample) {
      const bool clears = sample == 0 && worker > 0 && early == 0;
      places.push_back({buffer - early, clears, sample + 1 == own ? joins - early : 0});
    }
  }
  return {places.begin() + begin, places.begin() + end};
}

TEST_CASE("add_terms on the GPU gives the CPU's bits, for sums of every depth and as many samples as a call takes") {
  struct Case {
    int height, own;
    bool at_once;
    int64_t begin, end;  // 7, 11, 13, 255, 383: where several sums are live
  };
  const auto [height, own, at_once, begin, end] = GENERATE(values<Case>({{0, 1, false, 0, 1},
                                                                         {1, 1, false, 0, 2},
                                                                         {1, 1, true, 0, 2},
                                                                         {1, 3, false, 2, 6},
                                                                         {2, 1, true, 0, 4},
                                                                         {3, 1, false, 0, 8},
                                                                         {3, 1, true, 0, 7},
                                                                         {3, 1, false, 6, 8},
                                                                         {3, 2, false, 0, 13},
                                                                         {3, 2, false, 5, 15},
                                                                         {4, 1, true, 1, 15},
                                                                         {4, 1, false, 0, 11},
                                                                         {9, 1, false, 0, 512},
                                                                         {9, 1, true, 0, 383},
                                                                         {8, 2, false, 1, 255},
                                                                         {8, 3, false, 0, 383},
                                                                         {10, 1, false, 0, 896},

                                                                         {9, 1, false, 127, 255}}));
  const int64_t n = GENERATE(1, 4, 1031, 4096);
  const bool aligned = GENERATE(true, false);
  CAPTURE(height, own, at_once, begin, end, n, aligned);
  const std::vector<SamplePlace> places = tree_places(height, own, at_once, begin, end);
  const int64_t shift = aligned ? 0 : 1;
  const HostTensor terms = random_tensor(DType::kF32, {std::ssize(places), n}, 1);
  const DeviceTensor device_terms(terms);
  std::vector<HostTensor> expected;
  std::list<DeviceTensor> actual;
  std::vector<Tensor> buffers, device_buffers;
  for (int buffer = 0; buffer <= height; ++buffer) {
    expected.push_back(random_tensor(DType::kF32, {n + 1}, static_cast<unsigned>(buffer) + 2));
    device_buffers.push_back(actual.emplace_back(expected.back()).tensor().rows(shift, shift + n));
  }
  for (const HostTensor& buffer : expected) buffers.push_back(buffer.tensor().rows(shift, shift + n));
  add_terms(kCpu, terms, {places, buffers});
  add_terms(gpu(), device_terms, {places, device_buffers});
  const auto live = static_cast<size_t>(places.back().buffer - places.back().joins);  // those above were joined
  auto next = actual.begin();
  for (size_t buffer = 0; buffer <= live; ++buffer) CHECK((next++)->host().same_bits(expected[buffer]));
}

}  // namespace
}  // namespace invar::ops
