#pragma once

#include <string>

#include "config/config.h"
#include "data/sampler.h"
#include "data/token_source.h"

namespace invar {

// Settles data.eod_id of a config that asks for documents (data.reset_at_eod, data.eod_mask_loss); others stay as they
// are. What stands beside the token files comes first, as it tells what is in them; then the model's document end.
// Error{kConfig} if nobody tells, if the config or another source says otherwise, or if it is no token of the model;
// Error{kData} for a file that cannot be read.
void settle_eod_id(Config& config);

// A warning if no document ends among the tokens that the run reads first, a million at most; else empty. It reads
// until it finds one. The samples are those at global positions [first, first + count).
std::string warn_of_no_document_end(const DataConfig& data, const TokenSource& source, const Sampler& sampler,
                                    int64_t first, int64_t count);

}  // namespace invar
