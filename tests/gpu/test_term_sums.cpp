#include "ops/term_sums.h"

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

}  // namespace
}  // namespace invar::ops
