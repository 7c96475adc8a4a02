#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace invar {

// Hashes of the bit patterns of a training state, the same at every layout, from those of blocks (ops/block_hashes.h):
//   block  = Σ mix(index in the block · 2³² + bits of the element)                         modulo 2⁶⁴
//   tensor = Σ mix(mix(index of the block) + block)
//   kind   = mix(Σ mix(mix(hash_name(name)) + tensor))                                     of all tensors
//   combined: the kinds in the order of StateKind, bits of the loss, bits of the gradient norm, one after another
// with mix = split_mix (core/split_mix.h). Sums of integers do not depend on their order, so ranks add what they hold.
// −0 and +0 differ, as do two NaNs of other bits. Against chance, not against an adversary.
enum class StateKind : uint8_t { kWeights, kExpAvg, kExpAvgSq, kGradients };  // weights: the fp32 masters
constexpr size_t kStateKinds = 4;
constexpr std::array<std::string_view, kStateKinds> kStateKindNames = {"weights", "exp_avg", "exp_avg_sq", "gradients"};

uint64_t hash_tensor(std::span<const int64_t> blocks);

struct TensorHash {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> blocks;

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
