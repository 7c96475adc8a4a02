#include "app/compare_hashes.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "app/compare_metrics.h"
#include "checkpoint/hdf5_file.h"
#include "observe/metrics.h"
#include "train/step_hash.h"

namespace invar::app {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

// The tensors' hashes of a step, by kind; null without them. A file of many long lines, of which one is parsed.
ordered_json read_tensors(const fs::path& run, int64_t step) {
  std::ifstream file(run / (std::string(StateHashWriter::kStateHashesName) + ".jsonl"));
  const std::string head = format("{{\"step\":{},", step);
  std::string found;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (line.starts_with(head)) found = std::move(line);
  }
  ordered_json tensors = ordered_json::parse(found, nullptr, false);
  return tensors.is_object() ? tensors : ordered_json();
}

struct Blocks {
  std::vector<int64_t> hashes;
  std::vector<int64_t> shape;
};

// The blocks of a tensor, if the run has a file of them and it is of the state that the tensor's hash is of: an earlier
// run may have left one.
std::optional<Blocks> read_blocks(const fs::path& run, int64_t step, const std::string& kind, const std::string& tensor,
                                  const ordered_json& hash) {
  const fs::path path = block_hashes_path(run, step);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  const Hdf5Reader reader(path);
  const auto read = [&](const std::string& name) {
    std::vector<int64_t> values(static_cast<size_t>(reader.info(name).rows()));
    reader.read_rows<int64_t>(name, {0, std::ssize(values)}, values);
    return values;
  };
  const Blocks blocks{read(kind + "/" + tensor), read("shape/" + tensor)};
  return hash == hash_text(hash_tensor(blocks.hashes)) ? std::optional(blocks) : std::nullopt;
}

void find_block(KindDifference& found, const fs::path& run_a, const fs::path& run_b, int64_t step,
                const ordered_json& hash_a, const ordered_json& hash_b) {
  const std::optional<Blocks> a = read_blocks(run_a, step, found.kind, found.first, hash_a);
  const std::optional<Blocks> b = read_blocks(run_b, step, found.kind, found.first, hash_b);
  if (!a || !b || a->shape != b->shape || a->hashes.size() != b->hashes.size()) return;
  const auto differing = std::mismatch(a->hashes.begin(), a->hashes.end(), b->hashes.begin()).first;
  found.block = differing - a->hashes.begin();
  found.shape = a->shape;
}

KindDifference compare_kind(const std::string& kind, const fs::path& run_a, const fs::path& run_b, int64_t step) {
  KindDifference found{kind, 0, "", std::nullopt, {}};
  const ordered_json lines[] = {read_tensors(run_a, step), read_tensors(run_b, step)};
  if (!lines[0].contains(kind) || !lines[1].contains(kind)) return found;
  const ordered_json &a = lines[0][kind], &b = lines[1][kind];
  for (const auto& [name, hash] : a.items()) {
    const auto other = b.find(name);
    if (other != b.end() && *other == hash) continue;
    if (++found.tensors > 1) continue;
    found.first = name;
    if (other != b.end()) find_block(found, run_a, run_b, step, hash, *other);
  }
  for (const auto& [name, hash] : b.items()) {
    if (a.contains(name)) continue;
    if (++found.tensors == 1) found.first = name;
  }
  return found;
}

}  // namespace

std::optional<HashDifference> compare_hashes(const fs::path& metrics_a, const fs::path& metrics_b) {
  const DigestTable a = read_digests(metrics_a), b = read_digests(metrics_b);
  HashDifference found;
  for (const auto& [step, digest] : a) {
    const auto other = b.find(step);
    if (other == b.end()) continue;
    ++found.steps;
    if (digest == other->second) {
      ++found.equal;
    } else if (!found.first_differing) {
      found.first_differing = step;
    }
  }
  if (found.steps == 0) return std::nullopt;
  if (!found.first_differing) return found;
  const auto hash_of = [&](const DigestTable& table, const std::string& kind) {
    const auto& hashes = table.at(*found.first_differing);
    const auto at = hashes.find(kind);
    return at == hashes.end() ? "" : at->second;
  };
  for (const std::string_view name : kStateKindNames) {
    const std::string kind(name);
    if (hash_of(a, kind) == hash_of(b, kind)) continue;
    found.kinds.push_back(compare_kind(kind, metrics_a.parent_path(), metrics_b.parent_path(), *found.first_differing));
  }
  return found;
}

}  // namespace invar::app
