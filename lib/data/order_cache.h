#pragma once

#include <string>

#include "data/megatron_order.h"

namespace invar {

struct KeptOrder {
  MegatronOrder order;
  std::string told;  // "; order read from FILES", to end a log line with
};

// The order of build_order() as files in `folder`, made on first use: HASH-document_index.npy (int32), sample_index
// (int32 pairs), shuffle_index (uint32), and HASH-description.txt, which tells what the order depends on and is what
// HASH is made of: the plan, the lengths of the sequences, and `origin`, lines for a person. It ends with a checksum of
// each array. Callers of any number of ranks and jobs may ask at once: one builds under a lock while the others wait,
// then all read the same files. Each caller reads them whole once and checks the sums, so that no rank trains on
// another order. Files that are missing, cut off, damaged, without sums, or not what is asked for are made anew; a
// process that dies building leaves none under those names. Error{kConfig} naming data.cache_dir if it cannot be
// written.
KeptOrder keep_order(const std::string& folder, const std::string& origin, const OrderPlan& plan,
                     const StoredArray<int32_t>& lengths);

}  // namespace invar
