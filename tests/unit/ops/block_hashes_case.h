#pragma once

#include "host_tensor.h"
#include "ops/block_hashes.h"

namespace invar::test {

// Storage of a part of a logical tensor of `numel` elements.
struct HashedForm {
  ops::LogicalIndex index;
  int64_t rows, cols, numel;
};

// Of (1001, 770) the rows from 300; transposed, its columns from 300 one by one; in pairs; and by 47. Of (3, 20000),
// whose rows are longer than a block, the columns from 1000. Of a vector. One element.
inline const std::vector<HashedForm> kHashedForms = {{{300 * 770, 770, 770, 0}, 701, 770, 1001 * 770},
                                                     {{300, 1, 1, 770}, 470, 1001, 1001 * 770},
                                                     {{300, 2, 2, 770}, 235, 2002, 1001 * 770},
                                                     {{300, 47, 47, 770}, 10, 47 * 1001, 1001 * 770},
                                                     {{1000, 1, 1, 20000}, 19000, 3, 3 * 20000},
                                                     {{7, 1, 1, 0}, 9000, 1, 9007},
                                                     {{4095, 1, 1, 0}, 1, 1, 4096}};

// Two tensors of which blocks of 32 rows take turns, as of gate and up, more than a launch takes; the first comes to
// the second's blocks only where it ends.
struct InterleavedRuns {
  static constexpr int64_t kBlockRows = 32, kTurns = 75, kCols = 40;
  static constexpr int64_t kOfTensor = kBlockRows * kTurns * kCols;
  HostTensor values = random_tensor(DType::kF32, {2 * kBlockRows * kTurns, kCols}, 4);
  size_t blocks = static_cast<size_t>(2 * hash_blocks(kOfTensor));
  std::vector<ops::HashedRows> runs;

  InterleavedRuns() {
    for (int64_t turn = 0; turn < kTurns; ++turn) {
      for (int64_t tensor = 0; tensor < 2; ++tensor) {
        const int64_t row = (2 * turn + tensor) * kBlockRows;
        const int64_t first = tensor * hash_blocks(kOfTensor) * kHashBlock + turn * kBlockRows * kCols;
        runs.push_back({{row, row + kBlockRows - turn % 3}, {first, kCols, kCols, 0}});
      }
    }
  }
};

}  // namespace invar::test
