#pragma once

#include "config/config.h"
#include "models/decoder_spec.h"

namespace invar {

// Gemma 4's text decoder (E2B, E4B, 12B, 31B): sandwich norms, sliding and full layers with heads of two sizes, shared
// keys and values, per-layer embeddings, a softcap, a scalar per layer. Names and shapes as in Hugging Face.
DecoderSpec gemma4_spec(const ModelConfig& config);

}  // namespace invar
