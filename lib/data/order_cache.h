#pragma once

#include <string>

#include "data/megatron_order.h"

namespace invar {

struct KeptOrder {
  MegatronOrder order;
  std::string told;       // "; order read from FILES", to end a log line with
  std::string warning{};  // that a file was damaged, with its name; else empty
};

// The order of build_order() as files in `folder`, made on first use. HASH-document_index.npy has int32,
// HASH-sample_index.npy int32 pairs, and HASH-shuffle_index.npy uint32.
//
// HASH-description.txt tells what the order depends on: the plan, the lengths of the sequences, and `origin`, lines for
// a person. HASH is made of it. It ends with a checksum of each array.
//
// Callers of any number of ranks and jobs may ask at once. One builds under a lock while the others wait; then all read
// the same files. Each caller reads them whole once and checks the sums, so that no rank trains on another order.
//
// Files that are damaged are made anew, which `warning` tells. A process that dies building leaves none under those
// names. Error{kData} names a file that cannot be read. Error{kConfig} names data.cache_dir if it cannot be used, and
// Error{kFault} tells a full or broken disk.
KeptOrder keep_order(const std::string& folder, const std::string& origin, const OrderPlan& plan,
                     const StoredArray<int32_t>& lengths);

}  // namespace invar
