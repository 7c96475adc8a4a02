#pragma once

#include <functional>
#include <string>

#include "app/selftest_bits.h"
#include "config/config.h"
#include "train/step_hash.h"

namespace invar::app {

// The lines of `invar selftest`, each printed as it is known.
class SelftestReport {
 public:
  // "NAME ... ok", or "NAME ... FAILED (DIFFERENCE)". `difference` returns what differs, empty for nothing; an Error
  // that it throws is a failure too.
  void check(const std::string& name, const std::function<std::string()>& difference);
  // "NAME ... TEXT": for people, and for a comparison of machines.
  void tell(const std::string& name, const std::string& text) const;

  int checks() const { return checks_; }
  int failed() const { return failed_; }

 private:
  int checks_ = 0;
  int failed_ = 0;
};

// Each on the device of the stream, which is invariant.

// Products against chains of fused multiply-adds, and against themselves with rows, columns and K cut.
void check_products(SelftestReport& report, const Stream& stream);
// What adds up a head, a row or a block of tokens against the same in calls of other sizes.
void check_attention(SelftestReport& report, const Stream& stream);
void check_rows(SelftestReport& report, const Stream& stream);
// Elementary functions over fixed inputs by a hash of their results.
void check_functions(SelftestReport& report, const Stream& stream);

// A training run as its digests tell it, one a step.
using Trajectory = std::vector<StateDigest>;

// Empty, or "step 2: exp_avg, weights".
std::string difference(const Trajectory& actual, const Trajectory& expected);

// Tiny models at several layouts, whose ranks are threads, for so many steps. Tells their contracts and a hash of all
// their states too.
void check_training(SelftestReport& report, DeviceChoice device, int64_t steps);

}  // namespace invar::app
