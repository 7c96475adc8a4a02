#pragma once

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "config/hf_towers.h"
#include "parallel/parameter.h"
#include "parallel/topology.h"

namespace invar {

// The text model's name of a tensor of the files: files of several modalities begin it with model.language_model.
// instead of model.
std::string text_model_name(const std::string& name_in_file);

// The weights of a Hugging Face model's folder by the names of its text model. Beside it the files may hold the towers
// of other modalities that the folder's config.json declares.
class HfWeights {
 public:
  // A folder, or a .safetensors file in one. Without a config.json no towers are declared. Throws as SafetensorsReader
  // and read_hf_config() do.
  explicit HfWeights(const std::filesystem::path& path);

  const SafetensorsReader& files() const { return files_; }
  // What the files call a tensor of the text model.
  std::string name_in_file(const std::string& name) const;
  // The modality of the tower that a tensor of the files belongs to; empty if it is of none.
  std::string modality_of(const std::string& name_in_file) const;
  // How many tensors of which towers the files hold beside the text model, as a sentence's part; empty if none.
  std::string describe_left_out() const;

 private:
  SafetensorsReader files_;
  std::vector<HfTower> towers_;
};

// Fills the table's values with the weights of a Hugging Face model: each rank reads the rows that it holds, at any
// layout. Strict both ways: every parameter must be there once with its shape and with finite values, and every tensor
// of the files must be a parameter. Exceptions are what the table calls unused, the towers, and an lm_head.weight
// beside tied embeddings that equals them. Throws Error{kData} naming file and tensor. On a table of meta tensors it
// only checks names and shapes. Not collective.
void load_hf_weights(const ParameterTable& table, const Stream& stream, const HfWeights& weights);

// SafetensorsReader::read_rows(), which refuses NaN and infinities: Error{kData} with file, tensor and element.
void read_finite_rows(const SafetensorsReader& reader, const std::string& name, Range rows, Range cols,
                      std::span<float> out);

// A parameter's run out of the tensor `name` of the same logical shape, unit-major as storage holds it. All values are
// finite, or it throws as read_finite_rows().
std::vector<float> read_run(const SafetensorsReader& reader, const std::string& name, const Parameter& parameter,
                            const RowRun& run);

// Writes the values as model.safetensors (or shards and an index) into the folder, in their dtype. config.json is the
// caller's. Collective over the first replica's tensor group; its rank 0 writes.
void export_hf_weights(const ParameterTable& table, const ProcessGroups& groups, const Stream& stream,
                       const std::filesystem::path& folder, int64_t max_shard_bytes = int64_t{5} << 30);

}  // namespace invar
