#pragma once

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "parallel/parameter.h"
#include "parallel/topology.h"

namespace invar {

// Fills the table's values with the weights of a Hugging Face model: each rank reads the rows that it holds, at any
// layout. Strict both ways: every parameter must be there once with its shape, and every tensor of the files must be a
// parameter, with these exceptions: an lm_head.weight beside tied embeddings that equals them; what the table calls
// unused; and in the file of a multimodal model, whose text tensors are named model.language_model. instead of model.,
// the towers and embedders of vision and audio. Throws Error{kData} naming file and tensor. On a table of meta tensors
// it only checks. Not collective.
void load_hf_weights(const ParameterTable& table, const Stream& stream, const SafetensorsReader& reader);

// What the files call a tensor of the text model.
std::string name_in_file(const SafetensorsReader& reader, const std::string& name);

// A parameter's run out of the tensor `name` of the same logical shape, unit-major as storage holds it.
std::vector<float> read_run(const SafetensorsReader& reader, const std::string& name, const Parameter& parameter,
                            const RowRun& run);

// Writes the values as model.safetensors (or shards and an index) into the folder, in their dtype. config.json is the
// caller's. Collective over the first replica's tensor group; its rank 0 writes.
void export_hf_weights(const ParameterTable& table, const ProcessGroups& groups, const Stream& stream,
                       const std::filesystem::path& folder, int64_t max_shard_bytes = int64_t{5} << 30);

}  // namespace invar
