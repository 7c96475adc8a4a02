#pragma once

#include "parallel/leaf_cut.h"
#include "parallel/sum_policy.h"

namespace invar {

// One product for all columns of this rank, and TensorRegion::reduce().
std::unique_ptr<CutProduct> partial_product(const SumContext& ctx, int64_t columns, const ops::Numerics& numerics);

// The leaves of the cut are added by its tree, each rounded to region.reduce_dtype() before, unless they are never
// alone on a rank. numerics outlives it.
std::unique_ptr<CutProduct> leaf_product(const SumContext& ctx, const LeafCut& cut, int64_t columns,
                                         const ops::Numerics& numerics);

}  // namespace invar
