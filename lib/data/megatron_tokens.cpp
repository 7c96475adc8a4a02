#include "data/megatron_tokens.h"

#include <filesystem>
#include <utility>

#include "data/megatron_split.h"

namespace invar {

std::string megatron_prefix(const std::string& path) {
  const bool has_ending = path.ends_with(".bin") || path.ends_with(".idx");
  std::error_code error;
  return has_ending && !std::filesystem::exists(path + ".idx", error) ? path.substr(0, path.size() - 4) : path;
}

namespace {

TokenArray open_tokens(const std::string& path, const MegatronIndex& index, int64_t vocab_size) {
  InputFile file(path, "check data.path");
  const int64_t bytes = index.tokens() * size_of(index.type());
  if (file.size() != bytes) {
    throw Error(ErrorKind::kData,
                format("token file {}: the index says {} {} tokens, which makes {} bytes, but the file has {}", path,
                       index.tokens(), name_of(index.type()), bytes, file.size()),
                "the .bin file is truncated, or belongs to another .idx");
  }
  return {std::move(file), 0, index.type(), "the .idx file", vocab_size};
}

// The order in memory, or in data.cache_dir.
KeptOrder open_order(const DataConfig& data, const std::string& prefix, const TokenRequest& request, Range sequences,
                     const StoredArray<int32_t>& lengths) {
  const int64_t wanted = request.once ? 0 : request.samples_wanted;
  const OrderPlan plan = plan_order(lengths, request.sequence_length, wanted, request.seed);
  if (data.cache_dir.empty()) return {in_memory(build_order(plan, lengths)), "", ""};
  const std::string origin = format("dataset: {}\n{} split of \"{}\": sequences [{}, {})\n", prefix,
                                    name_of(request.split), data.split, sequences.begin, sequences.end);
  return keep_order(data.cache_dir, origin, plan, lengths);
}

}  // namespace

MegatronTokens::MegatronTokens(const DataConfig& data, const TokenRequest& request)
    : TokenSource(request.sequence_length),
      split_(request.split),
      index_(megatron_prefix(data.path) + ".idx"),
      tokens_(open_tokens(megatron_prefix(data.path) + ".bin", index_, request.vocab_size)),
      sidecar_(read_sidecar(tokens_.path())),
      sequences_(split_sequences(data.split, request.split == Split::kTrain ? 0 : 1, index_.sequences())),
      kept_(open_order(data, megatron_prefix(data.path), request, sequences_, index_.lengths().part(sequences_))) {
  if (sidecar_) check_sidecar(*sidecar_, tokens_, request.vocab_size);
  if (samples() >= 1) return;
  throw Error(ErrorKind::kData,
              format("{} has less than one sample of train.sequence_length + 1 = {} tokens in its {} split", data.path,
                     request.sequence_length + 1, name_of(split_)),
              "use a shorter train.sequence_length, or give the split more of data.split; take such a source out of "
              "data.blend");
}

std::vector<InputPrint> MegatronTokens::inputs() const {
  std::vector<InputPrint> inputs = {tokens_.print(), index_.print()};
  if (sidecar_) inputs.push_back(sidecar_->print);
  return inputs;
}

std::vector<std::string> MegatronTokens::warnings() const {
  return kept_.warning.empty() ? std::vector<std::string>{} : std::vector{kept_.warning};
}

std::string MegatronTokens::describe() const {
  return format("{}: {} tokens ({}) in {} documents; {} split is sequences [{}, {}), {} samples{}", tokens_.path(),
                tokens_.size(), name_of(tokens_.type()), index_.documents(), name_of(split_), sequences_.begin,
                sequences_.end, samples(), kept_.told);
}

void MegatronTokens::fill(int64_t sample, std::span<int32_t> tokens) const {
  const auto tokens_of = [&](int64_t sequence) { return index_.tokens_of(sequences_.begin + sequence); };
  for (const Range& run : runs_of(kept_.order, sequences_.size(), tokens_of, sample, std::ssize(tokens))) {
    const auto count = static_cast<size_t>(run.size());
    tokens_.read(run.begin, tokens.first(count));
    tokens = tokens.subspan(count);
  }
}

}  // namespace invar
