#pragma once

#include <algorithm>
#include <cstdint>

namespace invar::ops {

// How an operation groups the additions of a sum. Only parallel/sum_policy.h decides it.
struct Numerics {
  // False: as is fastest on the device. True: in one order, whatever the sizes, the layout and the device's choice.
  bool invariant = false;
  // Of a dry run with a GPU as its target: raised to the device memory, in bytes, that the largest proof of a library's
  // algorithm takes there (ops/proofs.h). Null elsewhere.
  int64_t* proof_bytes = nullptr;

  // Nothing in fast numerics, where no algorithm is proved.
  void note_proof(int64_t bytes) const {
    if (invariant && proof_bytes != nullptr) *proof_bytes = std::max(*proof_bytes, bytes);
  }
};

}  // namespace invar::ops
