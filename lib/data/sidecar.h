#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/config.h"
#include "core/input_print.h"
#include "data/token_array.h"

namespace invar {

// What FILE.bin.json says of the token file FILE.bin. tools/tokenise writes it; each field may be absent.
struct Sidecar {
  std::string path;
  std::string dtype;                  // "uint16"; empty: not said
  std::optional<int64_t> vocab_size;  // every id is below it
  std::optional<int64_t> eod_id;      // the token after each document
  std::optional<int64_t> tokens;
  InputPrint print;
};

// Nothing if there is no such file beside the token file. Error{kData} if it is damaged.
std::optional<Sidecar> read_sidecar(const std::string& token_file);

// Error{kData} if the token file is not what its sidecar says, or if the vocabulary is larger than the model's.
void check_sidecar(const Sidecar& sidecar, const TokenArray& tokens, int64_t vocab_size);

}  // namespace invar
