#include "config/replica_shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/layer_kinds.h"
#include "config/refuse.h"
#include "config/units.h"

namespace invar {
namespace {

// The largest part of some units that a rank holds, in whole leaves.
double largest_part(int64_t units, int64_t leaves, int64_t width) {
  const int64_t held = std::min(units, ceil_div(leaves, width) * ceil_div(units, leaves));
  return static_cast<double>(held) / static_cast<double>(units);
}

double largest_part(const Config& config, int64_t units, int64_t width) {
  const bool fast = config.numerics.reduction == Reduction::kFast;
  return largest_part(units, fast ? units : std::min(config.numerics.leaves, units), width);
}

// The same of query heads, which go by whole KV groups, or beyond the KV heads by runs of a group's query heads.
double largest_part_of_heads(const Config& config, int64_t kv_heads, int64_t width) {
  if (width <= kv_heads) return largest_part(config, kv_heads, width);
  const int64_t group = config.model.num_attention_heads / kv_heads;
  const bool fast = config.numerics.reduction == Reduction::kFast;
  const int64_t runs = fast ? group : head_runs(group, kv_heads, config.numerics.leaves);
  return largest_part(group, runs, width / kv_heads) / static_cast<double>(kv_heads);
}

// How many of at least as many shares as replicas each gets: one, then one after another by speed.
std::vector<int64_t> deal_shares(int64_t count, std::span<const double> speeds) {
  std::vector<int64_t> shares(speeds.size(), 1);
  const auto time_with_next = [&](size_t replica) {
    return static_cast<double>(shares[replica] + 1) / speeds[replica];
  };
  for (auto share = std::ssize(speeds); share < count; ++share) {
    size_t next = 0;
    for (size_t replica = 1; replica < speeds.size(); ++replica) {
      if (time_with_next(replica) < time_with_next(next)) next = replica;
    }
    ++shares[next];
  }
  return shares;
}

std::vector<int64_t> times(std::vector<int64_t> shares, int64_t unit) {
  for (int64_t& share : shares) share *= unit;
  return shares;
}

[[noreturn]] void refuse_shares(const Config& config, int64_t batch, size_t replicas) {
  const bool fast = config.numerics.reduction == Reduction::kFast;
  const int64_t unit = share_unit(config, batch);
  refuse(
      config, {"train.global_batch_size", "parallel.nonuniform.speeds", "parallel.nonuniform.failed"},
      format("{} samples in shares of {} ({}) leave one of {} replicas without any", batch, unit,
             fast ? "train.micro_batch_size" : "whole workers of numerics.workers, in whole micro-batches", replicas),
      format("use a larger train.global_batch_size or smaller train.micro_batch_size{}, or leave out a slow replica "
             "by parallel.nonuniform.min_tensor",
             fast ? "" : ", more numerics.workers (other bits)"));
}

std::vector<int64_t> keep_batch(const Config& config, int64_t batch, std::span<const double> speeds) {
  const int64_t unit = share_unit(config, batch);
  if (batch % unit != 0) {
    refuse(config, {"train.global_batch_size", "train.micro_batch_size"},
           format("train.global_batch_size = {} is not a multiple of train.micro_batch_size = {}", batch,
                  config.train.micro_batch_size),
           format("use {}", round_up(batch, config.train.micro_batch_size)));
  }
  if (batch / unit < std::ssize(speeds)) refuse_shares(config, batch, speeds.size());
  return times(deal_shares(batch / unit, speeds), unit);
}

std::vector<int64_t> shrink_batch(const Config& config, int64_t full_batch, int data, std::span<const double> speeds) {
  const int64_t micro = config.train.micro_batch_size;
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  const double base = static_cast<double>(full_batch) / static_cast<double>(micro * data);
  std::vector<int64_t> shares;
  for (const double speed : speeds) {
    constexpr double kRounding = 1e-9;  // of the quotients
    shares.push_back(std::max<int64_t>(1, static_cast<int64_t>(std::floor(base * speed / fastest + kRounding))));
  }
  const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  if (all * micro > full_batch) refuse_shares(config, full_batch, speeds.size());
  if (config.numerics.reduction == Reduction::kFast) return times(shares, micro);
  // Where workers begin depends on the batch: the largest one that can be dealt out without more for anybody.
  const int64_t largest = micro * all;
  for (int64_t batch = largest; batch >= std::max(micro, config.numerics.workers); batch -= micro) {
    const int64_t unit = share_unit(config, batch);
    if (batch / unit < std::ssize(speeds)) continue;
    const std::vector<int64_t> dealt = deal_shares(batch / unit, speeds);
    bool in_time = true;
    for (size_t replica = 0; replica < shares.size(); ++replica) {
      in_time = in_time && dealt[replica] * unit <= shares[replica] * micro;
    }
    if (in_time) return times(dealt, unit);
  }
  refuse_shares(config, largest, speeds.size());
}

}  // namespace

double modelled_time(const Config& config, int width) {
  const ModelConfig& model = config.model;
  const auto hidden = static_cast<double>(model.hidden_size);
  double all = 0;
  double on_widest = 0;
  const auto add = [&](double work, double part) {
    all += work;
    on_widest += work * part;
  };
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    const int64_t kv_heads = layer_key_value_heads(model, layer);
    const int64_t own_kv_heads = shares_key_values(model, layer) ? 0 : kv_heads;
    const auto head_dim = static_cast<double>(layer_head_dim(model, layer));
    const auto heads = static_cast<double>(model.num_attention_heads);
    const auto sequence = static_cast<double>(config.train.sequence_length);
    const bool sliding = is_sliding(model, layer);
    const double keys = sliding ? std::min(static_cast<double>(model.sliding_window), sequence / 2) : sequence / 2;
    const double projections = 2 * hidden * head_dim * (heads + static_cast<double>(own_kv_heads));
    add(projections + 2 * keys * heads * head_dim, largest_part_of_heads(config, kv_heads, width));
    const int64_t intermediate = layer_intermediate_size(model, layer);
    add(3 * hidden * static_cast<double>(intermediate), largest_part(config, ffn_blocks(intermediate), width));
    if (const int64_t inputs = model.hidden_size_per_layer_input; inputs > 0) {
      add(3 * hidden * static_cast<double>(inputs), largest_part(config, per_layer_blocks(inputs), width));
    }
  }
  add(hidden * static_cast<double>(padded_vocab_size(model.vocab_size)),
      largest_part(config, vocab_units(model.vocab_size), width));
  return on_widest / all;
}

std::vector<double> replica_speeds(const Config& config, std::span<const int> widths,
                                   std::span<const int> grid_replicas) {
  const std::vector<double>& measured = config.parallel.nonuniform.speeds;
  std::vector<double> speeds;
  for (size_t replica = 0; replica < widths.size(); ++replica) {
    speeds.push_back(measured.empty() ? 1 / modelled_time(config, widths[replica])
                                      : measured[static_cast<size_t>(grid_replicas[replica])]);
  }
  return speeds;
}

int64_t share_unit(const Config& config, int64_t batch) {
  const int64_t micro = config.train.micro_batch_size;
  if (config.numerics.reduction == Reduction::kFast) return micro;
  // Workers begin at batch · w / workers, rounded down; at these multiples it is a whole number.
  return std::lcm(batch / std::gcd(batch, config.numerics.workers), micro);
}

std::vector<int64_t> share_samples(const Config& config, int64_t full_batch, int data, std::span<const double> speeds) {
  const bool keep = config.parallel.nonuniform.batch == BatchPolicy::kKeep;
  return keep ? keep_batch(config, full_batch, speeds) : shrink_batch(config, full_batch, data, speeds);
}

}  // namespace invar
