#include "config/failed_slots.h"

#include <charconv>
#include <optional>

#include "config/refuse.h"
#include "config/suggest.h"

namespace invar {
namespace {

constexpr std::string_view kFailedKey = "parallel.nonuniform.failed";
constexpr std::string_view kListsKey = "parallel.nonuniform.non_active_ranks_per_dp";

std::optional<int> to_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size() && value >= 0;
  return whole ? std::optional(value) : std::nullopt;
}

// "dp0.tp5" as slot 5 + tensor · 0.
std::optional<int> grid_slot(const Config& config, std::string_view entry) {
  const size_t dot = entry.find(".tp");
  if (!entry.starts_with("dp") || dot == std::string_view::npos) return std::nullopt;
  const std::optional<int> replica = to_number(entry.substr(2, dot - 2));
  const std::optional<int> slot = to_number(entry.substr(dot + 3));
  if (!replica || !slot) return std::nullopt;
  const ParallelConfig& parallel = config.parallel;
  if (*replica >= parallel.data || *slot >= parallel.tensor) {
    refuse(config, {kFailedKey},
           format("{}: {} is not in the grid of parallel.data · tensor = {} · {} slots", kFailedKey, entry,
                  parallel.data, parallel.tensor),
           format("slots are dp0.tp0 to dp{}.tp{}", parallel.data - 1, parallel.tensor - 1));
  }
  return *slot + parallel.tensor * *replica;
}

// "node03.gpu2" as the number of the launched rank there, which is its slot if all are launched.
int launched_slot(const Config& config, std::string_view entry, int launched, std::span<const HostSlot> hosts) {
  const size_t dot = entry.rfind(".gpu");
  const std::optional<int> local_rank = dot == std::string_view::npos ? std::nullopt : to_number(entry.substr(dot + 4));
  if (!local_rank || dot == 0) {
    refuse(config, {kFailedKey}, format("{}: {} names no slot", kFailedKey, entry),
           "write dp0.tp5, replica and tensor rank in the whole grid, or node03.gpu2, host and local rank");
  }
  const ParallelConfig& parallel = config.parallel;
  const int all = parallel.tensor * parallel.data + parallel.spare;
  if (hosts.empty() || launched != all) {
    refuse(config, {kFailedKey},
           hosts.empty() ? format("{}: the host of {} is only known in a job", kFailedKey, entry)
                         : format("{}: the slot of {} is only known if all {} ranks are launched, but the job has {}",
                                  kFailedKey, entry, all, launched),
           "name the slot instead, such as dp0.tp5");
  }
  const std::string_view host = entry.substr(0, dot);
  for (int rank = 0; rank < launched; ++rank) {
    const HostSlot& at = hosts[static_cast<size_t>(rank)];
    if (at.host == host && at.local_rank == *local_rank) return rank;
  }
  std::set<std::string_view> names;
  for (const HostSlot& at : hosts) names.insert(at.host);
  const std::vector<std::string_view> known(names.begin(), names.end());
  refuse(config, {kFailedKey}, format("{}: no rank was launched on {}", kFailedKey, entry),
         format("the hosts are {}; local ranks are counted from 0", join_words(known, ", ")));
}

// Replica of a key "dp" or "dp,cp,pp"; there is neither context nor pipeline parallelism.
int replica_of(const Config& config, const std::string& key) {
  std::vector<std::optional<int>> numbers;
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find(',', begin), key.size());
    std::string_view number = std::string_view(key).substr(begin, end - begin);
    number.remove_prefix(std::min(number.find_first_not_of(' '), number.size()));
    numbers.push_back(to_number(number));
    begin = end + 1;
  }
  const bool well_formed = (numbers.size() == 1 || numbers.size() == 3) && numbers.front();
  if (!well_formed || (numbers.size() == 3 && (numbers[1] != 0 || numbers[2] != 0))) {
    refuse(config, {kListsKey}, format("{}: {} is no replica", kListsKey, key),
           "write its number, or dp,cp,pp with cp = pp = 0: there is no context or pipeline parallelism");
  }
  return *numbers.front();
}

// The slots given for a replica; the key with three numbers before the one with one.
const std::vector<int>* given_slots(const Config& config, int replica) {
  const std::vector<int>* given = nullptr;
  for (const auto& [key, slots] : config.parallel.nonuniform.non_active_ranks_per_dp) {
    if (replica_of(config, key) == replica && (given == nullptr || key.find(',') != std::string::npos)) given = &slots;
  }
  return given;
}

void check_lists(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const NonuniformConfig& nonuniform = parallel.nonuniform;
  check_tp_base(config);
  check_count(config, "parallel.nonuniform.tp_spares", nonuniform.tp_spares, 0, parallel.tensor);
  check_count(config, "parallel.nonuniform.num_reduced_tp_dp_ranks", nonuniform.num_reduced_tp_dp_ranks, 0,
              parallel.data);
  for (const auto& [key, slots] : nonuniform.non_active_ranks_per_dp) {
    const int replica = replica_of(config, key);
    if (replica >= nonuniform.num_reduced_tp_dp_ranks) {
      refuse(config, {kListsKey},
             format("{}: replica {} is not among the first num_reduced_tp_dp_ranks = {}", kListsKey, key,
                    nonuniform.num_reduced_tp_dp_ranks),
             format("set parallel.nonuniform.num_reduced_tp_dp_ranks to at least {}", replica + 1));
    }
    for (const int slot : slots) {
      if (slot >= 0 && slot < parallel.tensor) continue;
      refuse(config, {kListsKey}, format("{}: replica {} has no slot {}", kListsKey, key, slot),
             format("slots are 0 to {}", parallel.tensor - 1));
    }
    if (std::ssize(std::set<int>(slots.begin(), slots.end())) > nonuniform.tp_spares) {
      refuse(config, {kListsKey, "parallel.nonuniform.tp_spares"},
             format("{}: replica {} lacks more slots than tp_spares = {}", kListsKey, key, nonuniform.tp_spares),
             format("set parallel.nonuniform.tp_spares to {}", slots.size()));
    }
  }
}

std::set<int> listed_slots(const Config& config) {
  check_lists(config);
  const int tensor = config.parallel.tensor;
  const NonuniformConfig& nonuniform = config.parallel.nonuniform;
  std::set<int> failed;
  for (int replica = 0; replica < nonuniform.num_reduced_tp_dp_ranks; ++replica) {
    const int first = tensor * replica;
    if (const std::vector<int>* given = given_slots(config, replica)) {
      for (const int slot : *given) failed.insert(first + slot);
    } else {
      for (int slot = tensor - nonuniform.tp_spares; slot < tensor; ++slot) failed.insert(first + slot);
    }
  }
  return failed;
}

}  // namespace

std::set<int> failed_slots(const Config& config, int launched, std::span<const HostSlot> hosts) {
  const std::vector<std::string>& entries = config.parallel.nonuniform.failed;
  if (entries.empty()) return listed_slots(config);
  std::set<int> failed;
  for (const std::string& entry : entries) {
    const std::optional<int> slot = grid_slot(config, entry);
    failed.insert(slot ? *slot : launched_slot(config, entry, launched, hosts));
  }
  return failed;
}

void check_tp_base(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const int base = parallel.nonuniform.tp_base;
  if (base == 0 || base == parallel.tensor) return;
  refuse(config, {"parallel.nonuniform.tp_base", "parallel.tensor"},
         format("parallel.nonuniform.tp_base = {} is not parallel.tensor = {}", base, parallel.tensor),
         format("both are the tensor ranks of a whole replica: set parallel.tensor: {}, or remove tp_base", base));
}

}  // namespace invar
