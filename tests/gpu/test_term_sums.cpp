#include "ops/term_sums.h"

#include <bit>
#include <list>

#include "like_cpu.h"
#include "term_sums_case.h"

namespace invar::ops {
namespace {

using namespace invar::test;

TEST_CASE("add_term_sums on the GPU gives the CPU's bits, also of more samples than a launch takes") {
  const TermSumsCase sums = term_sums_case(GENERATE(1, 12, 128, 129, 300));
  HostTensor rows(DType::kI64, {sums.table.packed_size()});
  std::ranges::copy(sums.table.packed(), rows.tensor().data<int64_t>());
  const HostTensor terms = random_tensor(DType::kF32, {sums.terms}, 1);
  const DeviceTensor device_rows(rows), device_terms(terms);
  std::vector<HostTensor> expected;
  std::list<DeviceTensor> actual;
  std::vector<Tensor> buffers, device_buffers;
  for (int buffer = 0; buffer < sums.buffers; ++buffer) {
    expected.push_back(random_tensor(DType::kF32, {sums.elements}, static_cast<unsigned>(buffer) + 2));
    device_buffers.push_back(actual.emplace_back(expected.back()));
  }
  for (const HostTensor& buffer : expected) buffers.push_back(buffer);
  add_term_sums(kCpu, sums.table, rows, terms, sums.places, buffers);
  add_term_sums(gpu(), sums.table, device_rows, device_terms, sums.places, device_buffers);
  auto next = actual.begin();
  for (const HostTensor& buffer : expected) CHECK((next++)->host().same_bits(buffer));
}

// Places of a tree over workers of one sample, `height` sums high, all of whose samples but the first `skipped` come.
std::vector<SamplePlace> tree_places(int height, size_t skipped) {
  std::vector<SamplePlace> places;
  for (int worker = 0; worker < 1 << height; ++worker) {
    const int buffer = std::popcount(static_cast<unsigned>(worker));
    places.push_back({buffer, worker > 0, std::countr_one(static_cast<unsigned>(worker))});
  }
  places.erase(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(skipped));
  return places;
}

TEST_CASE("add_terms on the GPU gives the CPU's bits, for sums of every depth and more samples than a launch takes") {
  const auto [height, skipped] =
      GENERATE(table<int, size_t>({{0, 0}, {1, 0}, {1, 1}, {2, 0}, {3, 0}, {3, 6}, {4, 1}, {9, 0}}));
  const int64_t n = GENERATE(1, 4, 1031, 4096);
  const bool aligned = GENERATE(true, false);
  CAPTURE(height, skipped, n, aligned);
  const std::vector<SamplePlace> places = tree_places(height, skipped);
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
  add_terms(kCpu, terms, places, buffers);
  add_terms(gpu(), device_terms, places, device_buffers);
  CHECK(actual.front().host().same_bits(expected.front()));  // the others were joined to it
}

}  // namespace
}  // namespace invar::ops
