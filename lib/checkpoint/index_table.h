#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_index.h"

namespace invar {

// index.bin: the text "invar checkpoint\n", the version, all fields of a CheckpointIndex in their order, and the CRC-32
// of all this. Numbers are 8 bytes, little endian, sums 4; lists and texts have their count before them.
std::vector<std::byte> encode_index(const CheckpointIndex& index);

// The bytes that an index begins with: text and version.
inline constexpr int64_t kIndexHead = 25;

// The version, by the first kIndexHead bytes or fewer. Error{kData} as that of decode_index().
int64_t check_index_head(std::span<const std::byte> bytes, const std::string& path);

// Error{kData} that names `path` for bytes that are no index, damaged, of another version, or that check_index()
// refuses. Memory is bounded by the number of bytes.
CheckpointIndex decode_index(std::span<const std::byte> bytes, const std::string& path);

// What a rank wrote, for another one. Error{kFault} for numbers that say nothing of that kind.
std::vector<int64_t> encode_shard(const WrittenShard& shard);
WrittenShard decode_shard(std::span<const int64_t> numbers);

}  // namespace invar
