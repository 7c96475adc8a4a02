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

}  // namespace invar::test
