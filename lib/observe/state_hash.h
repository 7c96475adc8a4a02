#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/range.h"

namespace invar {

struct Parameter;

// Hashes of the bit patterns of a training state, the same at every layout. A logical tensor (fp32, row-major) is cut
// into blocks of kHashBlock elements; the last one may be shorter.
//   block  = Σ mix(index in the block · 2³² + bits of the element)                         modulo 2⁶⁴
//   tensor = Σ mix(mix(index of the block) + block)
//   kind   = mix(Σ mix(mix(hash_name(name)) + tensor))                                     of all tensors
//   combined: the kinds in the order of StateKind, bits of the loss, bits of the gradient norm, one after another
// with mix the finaliser of SplitMix64. Sums of integers do not depend on their order, so ranks add what they hold.
// −0 and +0 differ, as do two NaNs of other bits. Against chance, not against an adversary.
constexpr int64_t kHashBlock = 4096;

enum class StateKind : uint8_t { kWeights, kExpAvg, kExpAvgSq, kGradients };  // weights: the fp32 masters
constexpr size_t kStateKinds = 4;
constexpr std::array<std::string_view, kStateKinds> kStateKindNames = {"weights", "exp_avg", "exp_avg_sq", "gradients"};

constexpr int64_t hash_blocks(int64_t elements) {
  return (elements + kHashBlock - 1) / kHashBlock;
}

// Adds the terms of rows `rows` of the parameter's unit-major form, stored (rows, cols), to the blocks of its logical
// tensor.
void add_to_blocks(const Parameter& parameter, Range rows, std::span<const float> stored, std::span<uint64_t> blocks,
                   int threads = 1);

uint64_t hash_tensor(std::span<const uint64_t> blocks);

struct TensorHash {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<uint64_t> blocks;

  uint64_t hash() const { return hash_tensor(blocks); }
};

// What a line of metrics says.
struct StateDigest {
  std::array<uint64_t, kStateKinds> kinds{};
  uint64_t combined = 0;
};

// The state after a step, and the gradients that led to it. Constants have no moments and no gradients.
struct StateHash {
  std::array<std::vector<TensorHash>, kStateKinds> tensors;

  std::vector<TensorHash>& of(StateKind kind) { return tensors[static_cast<size_t>(kind)]; }
  StateDigest digest(double loss, double grad_norm) const;
};

// 16 lower-case hex digits.
std::string hash_text(uint64_t hash);

}  // namespace invar
