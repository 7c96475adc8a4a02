#include "train/proof_log.h"

#include "core/format.h"
#include "ops/proofs.h"

namespace invar {

void ProofLog::tell(const Stream& stream, Log& log) {
  const ops::Proofs proofs = ops::proofs(stream);
  for (; slow_ < proofs.slow_products.size(); ++slow_) {
    log.warn(
        format("slow product: {}: no algorithm of cuBLASLt has the order of invariant numerics, and invar's own "
               "kernel computes it",
               proofs.slow_products[slow_]));
  }
  if (proofs.leaves_one_by_one && !one_by_one_) {
    log.warn("slow products: leaves are multiplied one by one, as the kernel for several failed its proof on this GPU");
  }
  one_by_one_ = proofs.leaves_one_by_one;
  const int64_t proved = proofs.products + proofs.attention_plans;
  if (proved == proved_) return;
  proved_ = proved;
  log.info(
      format("proved at their first use: {} products and {} plans of attention, {} products left to the own "
             "kernel; {:.1f} s and up to {:.1f} MiB of GPU memory for a moment",
             proofs.products, proofs.attention_plans, slow_, proofs.seconds,
             static_cast<double>(proofs.most_bytes) / (1 << 20)));
}

}  // namespace invar
