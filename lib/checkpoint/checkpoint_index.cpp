#include "checkpoint/checkpoint_index.h"

#include <algorithm>
#include <numeric>

#include "checkpoint/checksum.h"
#include "checkpoint/index_hdf5.h"
#include "checkpoint/index_table.h"
#include "checkpoint/run_directory.h"
#include "core/error.h"
#include "core/pending_file.h"

namespace invar {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTableFile = "index.bin";
constexpr const char* kSumFile = "index.crc32";  // of format 1
constexpr int64_t kLargestTable = int64_t{4} << 30;

constexpr const char* kRecopy = "copy the checkpoint again, or resume from another one";

void check_size(const InputFile& file, int64_t bytes) {
  if (file.size() == bytes) return;
  throw Error(ErrorKind::kData, format("{}: has {} bytes, was written with {}", file.path(), file.size(), bytes),
              kRecopy);
}

}  // namespace

int64_t CheckpointIndex::bytes() const {
  return std::accumulate(files.begin(), files.end(), int64_t{0},
                         [](int64_t sum, const ShardFile& file) { return sum + file.bytes; });
}

uint32_t sum_beside(const InputFile& file, std::vector<Range> values) {
  std::sort(values.begin(), values.end(), [](Range a, Range b) { return a.begin < b.begin; });
  values.push_back({file.size(), file.size()});
  uint32_t sum = 0;
  int64_t end = 0;
  for (const Range range : values) {
    sum = crc32_of(file, {end, range.begin}, sum);
    end = range.end;
  }
  return sum;
}

void write_index(const fs::path& folder, CheckpointIndex index) {
  check_index(index, folder.string(), ErrorKind::kFault);
  const fs::path path = folder / kIndexFile;
  write_hdf5_index(path, index);
  const InputFile file(path.string(), "", ErrorKind::kFault);
  index.hdf5_bytes = file.size();
  index.hdf5_sum = crc32_of(file, {0, file.size()});
  PendingFile table(folder / kTableFile);
  table.write_at(encode_index(index), 0);
  table.publish();
}

CheckpointIndex read_index(const fs::path& folder) {
  const fs::path path = folder / kTableFile;
  std::error_code error;
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found && fs::exists(folder / kSumFile, error)) {
    return read_hdf5_index(folder / kIndexFile, folder / kSumFile);
  }
  const InputFile file(path.string(), kRecopy);
  if (file.size() > kLargestTable) {
    throw Error(ErrorKind::kData, format("{}: {} bytes are more than any index has", path.string(), file.size()),
                kRecopy);
  }
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(file.size(), kIndexHead)));
  file.read_at(0, std::span(bytes));
  check_index_head(bytes, path.string());  // before the memory of a file that is something else
  bytes.resize(static_cast<size_t>(file.size()));
  file.read_at(0, std::span(bytes));
  return decode_index(bytes, path.string());
}

std::shared_ptr<const InputFile> open_shard(const fs::path& folder, const ShardFile& file) {
  auto opened = std::make_shared<const InputFile>((folder / ShardFile::name_of(file.rank)).string(), kRecopy);
  check_size(*opened, file.bytes);
  return opened;
}

void check_files(const fs::path& folder, const CheckpointIndex& index) {
  const InputFile hdf5((folder / kIndexFile).string(), kRecopy);
  check_size(hdf5, index.hdf5_bytes);
  if (crc32_of(hdf5, {0, hdf5.size()}) != index.hdf5_sum) {
    throw Error(ErrorKind::kData, format("{}: damaged, its checksum is not the one it was written with", hdf5.path()),
                kRecopy);
  }
  for (const ShardFile& file : index.files) (void)open_shard(folder, file);
}

}  // namespace invar
