#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/config.h"

namespace invar {

// The token that ends a document, and who says so.
struct DocumentEnd {
  int64_t id;
  std::string source;  // for messages: "train.bin.json"
};

// What separates documents in data made for the model: of a preset, or of the folder that model.hf_path names; nothing
// where neither tells. This need not be what ends an answer: instruct models of Qwen3 have <|im_end|> as eos_token_id,
// and their data <|endoftext|> between documents. A released vocabulary has a known token. Of other folders
// tokenizer.json tells by the names that tools/tokenise looks for, then eos_token_id of config.json and of
// generation_config.json, where it is one number. Error{kConfig} for a file of the folder that cannot be read.
std::optional<DocumentEnd> model_document_end(const ModelConfig& model);

}  // namespace invar
