#include "train/replica_work.h"

#include <algorithm>

namespace invar {
namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void ReplicaWork::start_anew(const Config& config, const ReplicaPlan& plan) {
  config_ = config;
  plan_ = plan;
  all_steps_ = steps_ = 0;
  timed_ = false;
  last_ = 0;
  recent_.clear();
  medians_.clear();
}

DeviceTimer* ReplicaWork::next_timer() {
  timed_ = all_steps_ < kFirstSteps || all_steps_ % kOneIn == 0;
  ++all_steps_;
  return timed_ ? &timer_ : nullptr;
}

void ReplicaWork::finish_step() {
  if (timed_) add(timer_.milliseconds() * 1e-3);
}

void ReplicaWork::add(double seconds) {
  last_ = seconds;
  if (++steps_ <= kWarmUpSteps) return;
  recent_.push_back(seconds);
  if (recent_.size() > kLastSteps) recent_.pop_front();
}

std::vector<double> ReplicaWork::gather(const ProcessGroups& groups) {
  const auto replicas = static_cast<size_t>(groups.topology.readers());
  const auto own = static_cast<size_t>(groups.reader());
  std::vector<double> seconds(2 * replicas, 0.0);
  seconds[own] = last_;
  if (!recent_.empty()) seconds[replicas + own] = median({recent_.begin(), recent_.end()});
  groups.world->all_reduce(Stream(DeviceType::kCpu), view_of(seconds), ReduceOp::kMax);
  const auto medians = seconds.begin() + static_cast<std::ptrdiff_t>(replicas);
  if (*std::min_element(medians, seconds.end()) > 0) medians_.assign(medians, seconds.end());
  seconds.resize(replicas);
  return seconds;
}

std::optional<MeasuredSpeeds> ReplicaWork::speeds() const {
  if (medians_.empty()) return std::nullopt;
  return measured_speeds(config_, plan_, medians_);
}

std::optional<MeasuredSpeeds> ReplicaWork::news() const {
  if (steps_ < next_news_) return std::nullopt;
  std::optional<MeasuredSpeeds> measured = speeds();
  return measured && measured->far_from_shares() ? measured : std::nullopt;
}

}  // namespace invar
