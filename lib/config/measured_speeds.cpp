#include "config/measured_speeds.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "config/replica_shares.h"
#include "core/error.h"

namespace invar {
namespace {

// By its text, which no math library rounds in its own way: ranks plan by it.
double to_three_digits(double value) {
  const std::string text = format("{:.3g}", value);
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

double samples_per_second(const MeasuredSpeeds::Share& share) {
  return static_cast<double>(std::reduce(share.samples.begin(), share.samples.end())) / share.seconds;
}

std::string list(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values) text += format("{}{}", text.empty() ? "" : ", ", value);
  return text;
}

}  // namespace

bool MeasuredSpeeds::far_from_shares() const {
  return !then.samples.empty() && samples_per_second(then) > samples_per_second(now) / 0.9;
}

std::string MeasuredSpeeds::describe() const {
  std::string values;
  for (const double speed : speeds) values += format("{}{:.3g}", values.empty() ? "" : ", ", speed);
  std::string text = format("parallel.nonuniform.speeds=[{}]", values);
  if (then.samples.empty()) {
    return text +
           format(" cannot share the batch: {}; the longest work of a step takes {:.3g} s", refusal, now.seconds);
  }
  if (then.samples == now.samples) {
    return text + format(" shares the batch as it is, {} samples: the longest work of a step takes {:.3g} s",
                         list(now.samples), now.seconds);
  }
  return text + format(
                    " shares the batch {} instead of {} samples: the longest work of a step takes {:.3g} s instead of "
                    "{:.3g} s",
                    list(then.samples), list(now.samples), then.seconds, now.seconds);
}

MeasuredSpeeds measured_speeds(const Config& config, const ReplicaPlan& plan, std::span<const double> seconds) {
  const size_t replicas = plan.widths.size();
  INVAR_CHECK(seconds.size() == replicas, "times of {} replicas for {}", seconds.size(), replicas);
  std::vector<double> rates;
  for (size_t replica = 0; replica < replicas; ++replica) {
    rates.push_back(static_cast<double>(plan.samples[replica]) / seconds[replica]);
  }
  const double fastest = *std::max_element(rates.begin(), rates.end());
  for (double& rate : rates) rate = to_three_digits(rate / fastest);
  const int data = grid_replicas(config, plan);
  const std::vector<int> places = plan.grid_places();
  MeasuredSpeeds measured;
  measured.speeds.assign(static_cast<size_t>(data), 1.0);
  for (size_t replica = 0; replica < replicas; ++replica) {
    measured.speeds[static_cast<size_t>(places[replica])] = rates[replica];
  }
  measured.now = {plan.samples, *std::max_element(seconds.begin(), seconds.end())};
  try {
    measured.then.samples = share_samples(config, grid_batch(config, data), data, rates);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kConfig) throw;
    measured.refusal = error.hint().empty() ? error.what() : format("{} ({})", error.what(), error.hint());
    return measured;
  }
  for (size_t replica = 0; replica < replicas; ++replica) {
    const double part =
        static_cast<double>(measured.then.samples[replica]) / static_cast<double>(plan.samples[replica]);
    measured.then.seconds = std::max(measured.then.seconds, part * seconds[replica]);
  }
  return measured;
}

}  // namespace invar
