#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "core/input_print.h"

namespace invar {

enum class Split : uint8_t { kTrain, kValidation };

std::string_view name_of(Split split);  // "train" | "validation"

// What a run asks of its data.
struct TokenRequest {
  Split split = Split::kTrain;
  int64_t sequence_length = 0;
  int64_t vocab_size = 0;
  uint64_t seed = 0;
  // Samples the whole run (or one evaluation) will consume; 0: one pass over megatron's data. Only megatron and blends
  // depend on it. Their order is laid out over as many epochs as this takes, so the same run must always ask for the
  // same number.
  int64_t samples_wanted = 0;
  // No sample twice, so that there may be fewer than are wanted: an evaluation.
  bool once = false;
};

// Numbered samples of sequence_length + 1 tokens each: inputs are the first sequence_length, labels the last. A sample
// is a pure function of its number, so any rank may read any of them, and there is no position to save.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  TokenSource(const TokenSource&) = delete;
  TokenSource& operator=(const TokenSource&) = delete;

  int64_t sequence_length() const { return sequence_length_; }
  virtual int64_t samples() const = 0;       // distinct samples
  virtual std::string describe() const = 0;  // one line for the log
  // What a person should know beside; mostly none.
  virtual std::vector<std::string> warnings() const { return {}; }
  // The files that it reads, always in one order. Error{kData} if they cannot be read.
  virtual std::vector<InputPrint> inputs() const { return {}; }

  // tokens (S + 1). Error{kData} for an id outside the vocabulary.
  void read(int64_t sample, std::span<int32_t> tokens) const;

 protected:
  explicit TokenSource(int64_t sequence_length) : sequence_length_(sequence_length) {}

 private:
  virtual void fill(int64_t sample, std::span<int32_t> tokens) const = 0;

  int64_t sequence_length_;
};

// Opens the source that data.kind names, or the blend of several. Error{kData} if the files cannot be used,
// Error{kConfig} if a key is wrong.
std::unique_ptr<TokenSource> make_token_source(const DataConfig& data, const TokenRequest& request);

}  // namespace invar
