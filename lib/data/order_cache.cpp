#include "data/order_cache.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "core/content_hash.h"
#include "core/damage.h"
#include "core/error.h"
#include "core/folder_lock.h"
#include "core/input_file.h"
#include "core/pending_file.h"
#include "core/presence.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFix = "make the file readable again, or name another folder";

// FNV-1a, 64 bits, of bytes after those of `hash`. The names of the files are made of it.
uint64_t name_hash(std::span<const std::byte> bytes, uint64_t hash = 0xcbf29ce484222325u) {
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
  return hash;
}

std::string describe(const std::string& origin, const OrderPlan& plan, const StoredArray<int32_t>& lengths) {
  uint64_t hash = name_hash({});
  visit_blocks(lengths, [&](int64_t, auto block) { hash = name_hash(std::as_bytes(block), hash); });
  return format(
      "order of samples as in Megatron's GPTDataset\n{}checksum of their lengths: {:016x}\n"
      "sequence length: {}\nseed: {}\nepochs: {}{}\nsamples: {}\n",
      origin, hash, plan.sequence_length, plan.seed, plan.epochs,
      plan.separate_last_epoch ? ", the last shuffled apart" : "", plan.samples);
}

// One array as a .npy file, format 1.0: these bytes, then the numbers.
struct ArrayFile {
  fs::path path;
  std::string header;
  int64_t count;  // of elements
};

// shape: as Python writes a tuple, "(5,)".
std::string npy_header(std::string_view dtype, const std::string& shape) {
  constexpr size_t kPreamble = 10;  // magic, version, length of the text
  constexpr size_t kAlignment = 64;
  std::string text = format("{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}", dtype, shape);
  text.append(kAlignment - 1 - (kPreamble + text.size()) % kAlignment, ' ');
  text += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xff);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

struct Files {
  fs::path prefix;
  fs::path description;
  fs::path lock;
  ArrayFile documents;
  ArrayFile starts;
  ArrayFile shuffled;

  Files(const fs::path& begin, const OrderPlan& plan)
      : prefix(begin),
        description(begin.string() + "-description.txt"),
        lock(begin.string() + ".lock"),
        documents{begin.string() + "-document_index.npy", npy_header("<i4", format("({},)", plan.entries())),
                  plan.entries()},
        starts{begin.string() + "-sample_index.npy", npy_header("<i4", format("({}, 2)", plan.samples + 1)),
               plan.samples + 1},
        shuffled{begin.string() + "-shuffle_index.npy", npy_header("<u4", format("({},)", plan.samples)),
                 plan.samples} {}
};

// Damage: a file of a kept order that is not what was written, with its name.
template <class T>
StoredArray<T> open_array(const ArrayFile& expected) {
  if (!is_there(expected.path, kFix)) throw Damage{format("{} is missing", expected.path.string())};
  const auto file = std::make_shared<const InputFile>(expected.path.string(), kFix);
  const auto begin = std::ssize(expected.header);
  std::string header(expected.header.size(), '\0');
  const bool fits = file->size() == begin + expected.count * static_cast<int64_t>(sizeof(T));
  if (fits) file->read_at(0, std::span(header));
  if (header != expected.header) throw Damage{format("{} is damaged", file->path())};
  return {file, begin, expected.count};
}

template <class T>
uint64_t checksum(const StoredArray<T>& array) {
  ContentHash hash;
  visit_blocks(array, [&](int64_t, auto block) { hash.add(std::as_bytes(block)); });
  return hash.value();
}

// The last line of the description: of each array, in the order of Files.
std::string checksums(const MegatronOrder& order) {
  return format("checksums of the arrays: {:016x} {:016x} {:016x}\n", checksum(order.document_index),
                checksum(order.sample_index), checksum(order.shuffle_index));
}

// The order in the files; nothing if it was never written whole, or by an invar that wrote no checksums.
std::optional<MegatronOrder> open_order(const Files& files, const std::string& description) {
  if (!is_there(files.description, kFix)) return std::nullopt;
  const InputFile file(files.description.string(), kFix);
  constexpr int64_t kLongest = 1 << 20;
  std::string stored(static_cast<size_t>(std::min(file.size(), kLongest)), '\0');
  file.read_at(0, std::span(stored));
  if (!stored.starts_with(description)) throw Damage{format("{} is damaged", file.path())};
  MegatronOrder order{open_array<int32_t>(files.documents), open_array<SampleStart>(files.starts),
                      open_array<uint32_t>(files.shuffled)};
  const std::string found = stored.substr(description.size()), expected = checksums(order);
  if (found == expected) return order;
  if (found.empty()) return std::nullopt;
  const std::string sums = expected.substr(expected.find(':'));
  for (size_t i = 0; const ArrayFile* array : {&files.documents, &files.starts, &files.shuffled}) {
    constexpr size_t kSum = 17;  // a blank, and 16 digits
    if (found.find(sums.substr(1 + kSum * i++, kSum)) != std::string::npos) continue;
    throw Damage{format("{} has not the checksum that {} says", array->path.string(), file.path())};
  }
  throw Damage{format("{} is damaged", file.path())};
}

// The file appears under its name when all of it is on the disk.
void publish(const fs::path& path, const std::string& text, std::span<const std::byte> numbers = {}) {
  PendingFile file(path);
  file.write_at(std::as_bytes(std::span(text)), 0);
  file.write_at(numbers, std::ssize(text));
  file.publish();
}

void write_order(const Files& files, const std::string& description, OrderArrays arrays) {
  publish(files.documents.path, files.documents.header, std::as_bytes(std::span(arrays.document_index)));
  publish(files.starts.path, files.starts.header, std::as_bytes(std::span(arrays.sample_index)));
  publish(files.shuffled.path, files.shuffled.header, std::as_bytes(std::span(arrays.shuffle_index)));
  // Last: no order is taken without it.
  publish(files.description, description + checksums(in_memory(std::move(arrays))));
}

}  // namespace

KeptOrder keep_order(const std::string& folder, const std::string& origin, const OrderPlan& plan,
                     const StoredArray<int32_t>& lengths) {
  const std::string description = describe(origin, plan, lengths);
  const Files files(fs::path(folder) / format("{:016x}", name_hash(std::as_bytes(std::span(description)))), plan);
  std::string damage;
  const auto opened = [&](std::string_view how) -> std::optional<KeptOrder> {
    try {
      auto order = open_order(files, description);
      if (!order) return std::nullopt;
      const std::string warning = damage.empty() ? "" : format("data.cache_dir: {}: the order is made anew", damage);
      return KeptOrder{std::move(*order), format("; order {} {}-*.npy", how, files.prefix.string()), warning};
    } catch (const Damage& found) {
      damage = found.what;
      return std::nullopt;
    }
  };
  const auto in_cache = [](const auto& action) {
    try {
      return action();
    } catch (const Error& error) {
      throw error.in("data.cache_dir");
    }
  };
  constexpr std::string_view kRead = "read from";
  if (auto kept = in_cache([&] { return opened(kRead); })) return std::move(*kept);
  const FolderLock lock = in_cache([&] { return lock_file(files.lock); });
  if (auto kept = in_cache([&] { return opened(kRead); })) return std::move(*kept);  // built while this one waited
  OrderArrays arrays = build_order(plan, lengths);
  return in_cache([&] {
    write_order(files, description, std::move(arrays));
    auto kept = opened("built and kept as");
    INVAR_CHECK(kept.has_value(), "{} differs from what was written", files.prefix.string());
    return std::move(*kept);
  });
}

}  // namespace invar
