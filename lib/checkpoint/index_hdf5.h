#pragma once

#include <filesystem>

#include "checkpoint/checkpoint_index.h"

namespace invar {

// index.h5: each tensor whole, as a virtual dataset, the config as a dataset of one text, and where the run stands, as
// attributes.
void write_hdf5_index(const std::filesystem::path& path, const CheckpointIndex& index);

// The index of a checkpoint of format 1, with the places of its pieces, for which all its shards are opened.
// Error{kData} names the file that is missing, damaged or of another shape.
CheckpointIndex read_hdf5_index(const std::filesystem::path& path, const std::filesystem::path& sum_path);

}  // namespace invar
