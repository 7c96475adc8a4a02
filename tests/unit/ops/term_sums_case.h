#pragma once

#include <algorithm>
#include <vector>

#include "core/integer.h"
#include "ops/term_sums.h"

namespace invar::test {

// Vectors of several widths and numbers of rows, whose rows lie scattered, for `samples` samples: workers of three, of
// each four of which a tree is added to the first buffer.
struct TermSumsCase {
  struct Vector {
    int64_t width;
    int64_t into;
    std::vector<int64_t> rows;
  };
  std::vector<Vector> vectors;
  std::vector<ops::SamplePlace> places;
  int64_t terms = 0;     // elements
  int64_t elements = 0;  // of a buffer
  ops::TermTable table;
};

inline TermSumsCase term_sums_case(int64_t samples) {
  TermSumsCase sums;
  sums.table = ops::TermTable(samples);
  for (const auto& [width, per_sample] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 3}, {64, 1}, {255, 2}, {257, 9}, {1030, 4}}) {
    TermSumsCase::Vector vector{width, sums.elements, {}};
    for (int64_t row = 0; row < samples * per_sample; ++row) vector.rows.push_back(sums.terms + row * width);
    std::ranges::reverse(vector.rows);
    std::ranges::rotate(vector.rows, vector.rows.begin() + std::ssize(vector.rows) / 3);
    sums.table.add(width, vector.into, vector.rows);
    sums.terms += samples * per_sample * width + 5;
    sums.elements = round_up(sums.elements + width, 64);
    sums.vectors.push_back(std::move(vector));
  }
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t worker = sample / 3 % 4;
    const bool ends = sample % 3 == 2;
    const std::vector<ops::SamplePlace> of_worker = {{1, true, 0}, {2, true, 1}, {2, true, 0}, {3, true, 3}};
    ops::SamplePlace place = of_worker[static_cast<size_t>(worker)];
    if (sample % 3 > 0) place.clears = false;
    if (!ends) place.joins = 0;
    sums.places.push_back(place);
  }
  return sums;
}

}  // namespace invar::test
