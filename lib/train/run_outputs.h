#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace invar {

// What a run writes into log.dir beside log.txt: config.yaml, metrics.jsonl, state_hashes.jsonl, and of single steps
// dump_step_N.h5 and hash_step_N.h5.
inline constexpr const char* kConfigFile = "config.yaml";
std::filesystem::path dump_path(const std::filesystem::path& run_directory, int64_t step);
std::filesystem::path block_hashes_path(const std::filesystem::path& run_directory, int64_t step);

// Before a run that begins anew: renames what an earlier one wrote there, metrics.jsonl to metrics.1.jsonl, all files
// with the same number, the first that none of them has. What it did, for the log; empty if there was nothing.
// Error{kFault} if the system refuses.
std::string keep_earlier_run(const std::filesystem::path& run_directory);

}  // namespace invar
