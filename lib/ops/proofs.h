#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ops/attention.h"

// In invariant numerics the algorithms of libraries are used once they were proved, each on its own shape and
// at its first use, to give the bits that every layout has: products of bf16 those of the fixed order
// (ops/cuda/matmul_chain.h), the plans of cuDNN's attention those of a plan for one KV group of one sample alone.
// invar's own kernel for several leaves (ops/cuda/leaf_products.cu) was proved on a shape of its own.
namespace invar::ops {

struct Proofs {
  int64_t products = 0;  // by sizes and layouts, that an algorithm of cuBLASLt was proved for
  // Those without such an algorithm, described: invar's own kernel computes them, with the same bits and not fast.
  std::vector<std::string> slow_products;
  // The kernel that adds several leaves is not used on this GPU of its kind: it failed its proof, or the driver is too
  // old.
  bool leaves_one_by_one = false;
  int64_t attention_plans = 0;
  double seconds = 0;      // that proofs took in all
  int64_t most_bytes = 0;  // of device memory that one of them took, and gave back
};

// What was proved on this queue so far; nothing on the CPU, where the order is that of the code.
Proofs proofs(const Stream& stream);

// Device memory that the proof of a product takes: operands in place of a and b, and of c if it is added to.
int64_t product_proof_bytes(int64_t bytes_a, int64_t bytes_b, int64_t bytes_added_to);
// The same of the kernel for several leaves, at most: its shape is its own.
constexpr int64_t kLeavesProofBytes = 6 << 20;
// The most that the proof of an attention plan takes: operands in place of those that a call reads, and all those of
// one KV group of one sample.
int64_t attention_proof_bytes(const AttentionParams& params, const HeadView& q, std::initializer_list<HeadView> read);

}  // namespace invar::ops
