#pragma once

#include <filesystem>
#include <vector>

#include "data/token_source.h"

namespace invar {

// The inputs of a run that must be the same on every rank, see check_inputs(). They are the files of its tokens, of the
// Hugging Face folder with its weights, and of the checkpoint that it goes on from. An empty path: none. Of a
// checkpoint the index alone, which has the sums of all that is in the shards. Error{kData} for a file that cannot be
// read.
std::vector<InputPrint> run_inputs(const TokenSource& tokens, const std::filesystem::path& hf_folder,
                                   const std::filesystem::path& checkpoint);

}  // namespace invar
