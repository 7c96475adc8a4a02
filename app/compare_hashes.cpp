#include "app/compare_hashes.h"

#include <algorithm>
#include <map>

#include "app/compare_metrics.h"
#include "checkpoint/hdf5_file.h"
#include "core/integer.h"
#include "core/json_object.h"
#include "core/presence.h"
#include "core/shown.h"
#include "core/text_lines.h"
#include "observe/metrics.h"
#include "ops/block_hashes.h"
#include "train/step_hash.h"

namespace invar::app {
namespace {

namespace fs = std::filesystem;

using TensorHashes = std::vector<std::pair<std::string, std::string>>;  // name, hash; in the run's order

// The tensors' hashes of a step; nothing without them. A file of many long lines, of which one is parsed.
std::optional<TensorHashes> read_tensors(const fs::path& run, int64_t step, const std::string& kind) {
  const fs::path path = run / StateHashWriter::kStateHashesFile;
  if (!is_there(path)) return std::nullopt;
  const std::string head = format("{{\"step\":{},", step);
  std::string found, where;
  for_each_line(path.string(), [&](int64_t number, const std::string& line) {
    if (!line.starts_with(head)) return;
    found = line;
    where = format("{}:{}", path.string(), number);
  });
  if (found.empty()) return std::nullopt;
  const JsonObject line = JsonObject::parse(found, where, {});
  if (!line.has(kind)) return std::nullopt;
  const JsonObject hashes = line.object(kind);
  TensorHashes tensors;
  for (const std::string& name : hashes.names()) tensors.emplace_back(name, hashes.text(name, ""));
  return tensors;
}

struct Blocks {
  std::vector<int64_t> hashes;
  std::vector<int64_t> shape;
};

// The blocks of a tensor, if the run has a file of them and they give the tensor's hash. An earlier run may have left a
// file of another state.
std::optional<Blocks> read_blocks(const fs::path& run, int64_t step, const std::string& kind, const std::string& tensor,
                                  const std::string& hash) {
  const fs::path path = block_hashes_path(run, step);
  if (!is_there(path)) return std::nullopt;
  const Hdf5Reader reader(path);
  const auto read = [&](const std::string& name) {
    std::vector<int64_t> values(static_cast<size_t>(reader.info(name).rows()));
    reader.read_rows<int64_t>(name, {0, std::ssize(values)}, values);
    return values;
  };
  const Blocks blocks{read(kind + "/" + tensor), read("shape/" + tensor)};
  const std::optional<int64_t> elements = checked_product(blocks.shape);
  const bool is_shape = std::ranges::all_of(blocks.shape, [](int64_t dim) { return dim >= 0; });
  if (!is_shape || !elements || hash_blocks(*elements) != std::ssize(blocks.hashes)) {
    throw Error(ErrorKind::kData, format("{}: the blocks of {} do not fit its shape", path.string(), shown(tensor)),
                "the file is damaged: restore it, or remove it to compare without blocks");
  }
  return hash == hash_text(hash_tensor(blocks.hashes)) ? std::optional(blocks) : std::nullopt;
}

void find_block(KindDifference& found, const fs::path& run_a, const fs::path& run_b, int64_t step,
                const std::string& hash_a, const std::string& hash_b) {
  const std::optional<Blocks> a = read_blocks(run_a, step, found.kind, found.first, hash_a);
  const std::optional<Blocks> b = read_blocks(run_b, step, found.kind, found.first, hash_b);
  if (!a || !b || a->shape != b->shape || a->hashes.size() != b->hashes.size()) return;
  const auto differing = std::mismatch(a->hashes.begin(), a->hashes.end(), b->hashes.begin()).first;
  found.block = differing - a->hashes.begin();
  found.shape = a->shape;
}

KindDifference compare_kind(const std::string& kind, const fs::path& run_a, const fs::path& run_b, int64_t step) {
  KindDifference found{kind, 0, "", std::nullopt, {}};
  const std::optional<TensorHashes> a = read_tensors(run_a, step, kind), b = read_tensors(run_b, step, kind);
  if (!a || !b) return found;
  const std::map<std::string, std::string> in_a(a->begin(), a->end()), in_b(b->begin(), b->end());
  for (const auto& [name, hash] : *a) {
    const auto other = in_b.find(name);
    if (other != in_b.end() && other->second == hash) continue;
    if (++found.tensors > 1) continue;
    found.first = name;
    if (other != in_b.end()) find_block(found, run_a, run_b, step, hash, other->second);
  }
  for (const auto& [name, hash] : *b) {
    if (in_a.contains(name)) continue;
    if (++found.tensors == 1) found.first = name;
  }
  return found;
}

}  // namespace

std::optional<HashDifference> compare_hashes(const fs::path& metrics_a, const fs::path& metrics_b) {
  const DigestTable a = read_digests(metrics_a), b = read_digests(metrics_b);
  if (a.empty() || b.empty()) return std::nullopt;
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
