#pragma once

#include "device/stream.h"
#include "observe/log.h"

namespace invar {

// Says what a device proves at the first use of algorithms (ops/proofs.h), and of each product that is slow for want of
// one that could be proved.
class ProofLog {
 public:
  // What came since it was last called; nothing if nothing did.
  void tell(const Stream& stream, Log& log);

 private:
  int64_t proved_ = 0;
  size_t slow_ = 0;
  bool one_by_one_ = false;
};

}  // namespace invar
