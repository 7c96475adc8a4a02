#include "observe/state_hash.h"

#include <bit>

#include "core/format.h"
#include "core/philox.h"
#include "core/split_mix.h"

namespace invar {

uint64_t hash_tensor(std::span<const int64_t> blocks) {
  uint64_t sum = 0;
  for (size_t i = 0; i < blocks.size(); ++i) sum += split_mix(split_mix(i) + static_cast<uint64_t>(blocks[i]));
  return sum;
}

StateDigest StateHash::digest(double loss, double grad_norm) const {
  StateDigest digest;
  const auto append = [&](uint64_t word) { digest.combined = split_mix(split_mix(digest.combined) + word); };
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    uint64_t sum = 0;
    for (const TensorHash& tensor : tensors[kind]) sum += split_mix(split_mix(hash_name(tensor.name)) + tensor.hash());
    digest.kinds[kind] = split_mix(sum);
    append(digest.kinds[kind]);
  }
  append(std::bit_cast<uint64_t>(loss));
  append(std::bit_cast<uint64_t>(grad_norm));
  return digest;
}

std::string hash_text(uint64_t hash) {
  return format("{:016x}", hash);
}

}  // namespace invar
