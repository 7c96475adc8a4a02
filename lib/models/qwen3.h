#pragma once

#include "config/config.h"
#include "models/decoder_spec.h"

namespace invar {

// Dense Qwen3: pre-norm decoder, grouped-query attention with q/k norm, SwiGLU. Names and shapes as in Hugging Face.
DecoderSpec qwen3_spec(const ModelConfig& config);

}  // namespace invar
