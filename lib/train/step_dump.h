#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "observe/activation_dump.h"
#include "train/step.h"

namespace invar {

class Hdf5Writer;

// Everything that one step computed, in one HDF5 file of logical tensors, for `invar compare`. With B the global batch,
// in the order of its samples:
//   tokens, labels  i32 (B, S)                loss, grad_norm  f64 (1), the norm before clipping
//   hidden.N        f32 (B, S, C)             what decoder layer N hands to the next
//   logits          f32 (B, S, vocab_size)    without the columns that pad the vocabulary
//   grad.NAME       f32, the weight's shape   of the mean loss, before clipping; NAME as Hugging Face has it
// and the attributes step (from 1), layout, precision, version. The names are those of a reference case's
// expected.safetensors. Equal bytes on every run at one layout.
//
// Give it to a step as sink; it keeps this rank's activations, as fp32 in host memory, until write().
class StepDump : public TensorSink {
 public:
  // vocabulary: padded vocabulary rows of this rank.
  StepDump(const Config& config, const ProcessGroups& groups, Range vocabulary);
  ~StepDump() override;

  bool wants(std::string_view name) const override;
  void record(const std::string& name, const Tensor& local, int64_t first_row) override;

  // log.dir/dump_step_N.h5, written by world rank 0, which holds one tensor at a time, activations in blocks of rows.
  // For StepHooks::gradients_complete; step counts from 1. Collective over the world.
  std::filesystem::path write(const TrainState& state, std::span<const Batch> batches, const StepResult& result,
                              int64_t step);

 private:
  // A rectangle of a micro-batch's activation: token rows × columns.
  struct Piece {
    Range rows;
    Range cols;
    std::vector<float> values;
  };
  using MicroBatchPieces = std::vector<Piece>;

  bool is_root() const { return groups_.world->rank() == 0; }
  void write_attributes(int64_t step);
  void write_ids(const Stream& stream, const std::string& name, std::span<const Batch> batches,
                 std::vector<int32_t> Batch::*member);
  void write_activation(const Stream& stream, const std::string& name, int64_t cols);
  std::vector<float> gather_block(const Stream& stream, const std::string& name, int reader, size_t micro_step,
                                  Range rows, int64_t cols) const;
  void write_gradients(const TrainState& state);

  const Config& config_;
  const ProcessGroups& groups_;
  Range vocabulary_;
  int64_t batch_;                                                     // samples of the global batch
  std::map<std::string, std::vector<MicroBatchPieces>> activations_;  // by name, then by micro-step
  std::unique_ptr<Hdf5Writer> file_;                                  // of the root
};

}  // namespace invar
