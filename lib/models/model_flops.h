#pragma once

#include "models/decoder_spec.h"

namespace invar {

// Floating-point operations that the mathematics of one training step needs, 2 per multiply-add, forward and backward:
// dense projections, attention over the visible pairs (S²/2 in a full layer, W·S − W²/2 with a window W) and the head
// over the padded vocabulary. Not counted: lookups, norms, and recomputation. As Megatron-LM counts them.
double model_flops_per_step(const DecoderSpec& spec, int64_t sequences, int64_t sequence_length);

}  // namespace invar
