#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "data/token_source.h"
#include "observe/activation_dump.h"
#include "train/train_state.h"

namespace invar::app {

// A folder that tools/make_reference.py wrote: a tiny model, tokens, and what independent code in float64 computed.
class ReferenceCase {
 public:
  // Error{kData} for a file that is not as make_reference.py writes it. Such are a token outside the vocabulary, a
  // result of another shape or type than the model's, and a noise that is no number.
  // Error{kConfig} for a model that invar does not have.
  explicit ReferenceCase(const std::filesystem::path& folder);

  // The run that the case describes: fp32, its model, batch and optimizer; the layout is the caller's.
  Config config() const;
  const SafetensorsReader& expected() const { return expected_; }
  // The case's steps one after another: sample step · batch + i.
  std::unique_ptr<TokenSource> tokens() const;

  int64_t batch() const { return batch_; }
  int64_t sequence_length() const { return sequence_length_; }
  int64_t steps() const { return steps_; }
  // How far fp32 may lie from the reference: ten times what fp32 did there.
  double logits_band() const { return 10 * noise_[0]; }
  // Of the hidden states, which may be larger than the logits; older cases bound them by the logits'.
  double hidden_band() const { return 10 * noise_[noise_.size() > 4 ? 4 : 0]; }
  double gradient_band() const { return 10 * noise_[1]; }
  double loss_band() const { return 10 * noise_[2]; }
  // Of the trajectory's gradient norms, which one element can move by as much as itself; cases from before it was
  // measured bound it by the losses'.
  double norm_band() const { return std::max(10 * noise_[noise_.size() > 3 ? 3 : 2], gradient_band()); }

 private:
  SafetensorsReader expected_;
  ModelConfig model_;
  OptimizerConfig optimizer_;
  int64_t batch_ = 0;
  int64_t sequence_length_ = 0;
  int64_t steps_ = 0;
  std::vector<double> noise_;
  std::vector<int32_t> tokens_;
};

// Largest error and number of compared elements of each kind of tensor.
struct Agreement {
  double worst = 0;
  double band = 0;
  double magnitude = 0;  // of the largest expected value
  int64_t elements = 0;
  int64_t expected_elements = 0;  // over all ranks; fewer means that something was never looked at

  void add(double got, double want, double error_band);  // NaN counts as infinitely wrong
  // "ok" where all was looked at and lies within the band, and zeros in its place would not; else why not.
  std::string_view verdict() const;
  bool holds() const { return verdict() == "ok"; }
};
using AgreementTable = std::map<std::string, Agreement>;  // by kind, "gradient self_attn.q_proj"

// Kinds of the whole trajectory.
inline constexpr const char* kLosses = "loss of every step";
inline constexpr const char* kGradientNorms = "norm of every step's gradient";

bool all_hold(const AgreementTable& table);

// Where a test steps in.
struct Intervention {
  std::function<void(TrainState&)> prepared;  // sees the state before the first step
  TensorSink* sink = nullptr;                 // listens to the first step too
  TrainState::WeightStoreMaker weights{};
};

// Trains the case's steps at the given layout and compares everything. Collective over the world; every rank gets the
// whole table.
AgreementTable compare_with_reference(const ReferenceCase& reference, const Config& config, const ProcessGroups& groups,
                                      const Stream& stream, const Intervention& intervention = {});

}  // namespace invar::app
