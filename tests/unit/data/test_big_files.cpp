// Files past 4 GiB and 2^31 tokens. They are sparse: only the tokens that are written take space.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/unique_handle.h"
#include "data/megatron_order.h"
#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr int64_t kLongest = (int64_t{1} << 31) - 1;  // tokens of a sequence

class SparseFile {
 public:
  SparseFile(const TemporaryFolder& folder, const std::string& name, int64_t bytes)
      : path((folder / name).string()), file_(::open(path.c_str(), O_RDWR | O_CREAT, 0644)) {
    REQUIRE(file_);
    is_sparse = ::ftruncate(file_.get(), bytes) == 0;
    struct stat status {};
    REQUIRE(::fstat(file_.get(), &status) == 0);
    is_sparse = is_sparse && status.st_blocks < 1000;
    if (!is_sparse) WARN("skipped: no sparse file of " << bytes << " bytes here");
  }

  template <class T>
  void write(int64_t first_token, const std::vector<T>& tokens) {
    const std::string bytes = bytes_of(tokens);
    REQUIRE(::pwrite(file_.get(), bytes.data(), bytes.size(), first_token * static_cast<int64_t>(sizeof(T))) ==
            std::ssize(bytes));
  }

  std::string path;
  bool is_sparse;

 private:
  UniqueHandle<int, ::close, -1> file_;
};

template <class T>
void check_flat(const std::string& token_dtype, int64_t tokens) {
  const TemporaryFolder folder;
  SparseFile file(folder, "big.bin", tokens * static_cast<int64_t>(sizeof(T)));
  if (!file.is_sparse) return;
  file.write<T>(0, {9, 8, 7, 6, 5});
  file.write<T>(tokens - 5, {1, 2, 3, 4, 5});
  DataConfig data;
  data.kind = DataKind::kTokens;
  data.path = file.path;
  data.token_dtype = token_dtype;
  const auto train = make_token_source(data, {.sequence_length = 4, .vocab_size = 10});
  REQUIRE(train->samples() == (tokens - 1) / 4);
  CHECK(sample_of(*train, 0) == std::vector<int32_t>{9, 8, 7, 6, 5});
  CHECK(sample_of(*train, train->samples() - 1) == std::vector<int32_t>{1, 2, 3, 4, 5});
  CHECK(contains(train->describe(), format("{} tokens ({})", tokens, token_dtype)));
  // The last quarter, whose length is a multiple of 4: its last sample ends three tokens earlier.
  data.validation_fraction = 0.25;
  const auto tail = make_token_source(data, {.split = Split::kValidation, .sequence_length = 4, .vocab_size = 10});
  CHECK(sample_of(*tail, tail->samples() - 1) == std::vector<int32_t>{0, 0, 0, 1, 2});
  CHECK(contains(tail->describe(), format("tokens [{}, {})", tokens - tokens / 4, tokens)));
  file.write<T>(tokens - 3, {11});
  require_error(ErrorKind::kData, {format("token {} has id 11", tokens - 3)},
                [&] { sample_of(*train, train->samples() - 1); });
}

}  // namespace

TEST_CASE("flat files past 4 GiB and 2^31 tokens") {
  check_flat<uint16_t>("uint16", (int64_t{1} << 31) + (1 << 20) + 1);
  check_flat<uint16_t>("uint16", (int64_t{1} << 33) + 1);
  check_flat<uint32_t>("uint32", (int64_t{1} << 32) + 1);
}

TEST_CASE("a Megatron dataset of sequences as long as an .idx can tell") {
  const TemporaryFolder folder;
  constexpr int64_t kTokens = 3 * kLongest + 6;
  SparseFile file(folder, "big.bin", 2 * kTokens);
  if (!file.is_sparse) return;
  // Each sequence begins and ends with tokens of its own; that of 6 tokens lies past 2^32 bytes.
  constexpr auto kLength = static_cast<int32_t>(kLongest);
  const IndexBytes index = IndexBytes::of({kLength, kLength, 6, kLength}, 8, 2);
  folder.write("big.idx", index.bytes());
  const auto ends = [&](int64_t first, int64_t length, uint16_t id) {
    file.write<uint16_t>(first, {id, 1});
    file.write<uint16_t>(first + length - 2, {2, id});
  };
  ends(0, kLongest, 10);
  ends(kLongest, kLongest, 11);
  ends(2 * kLongest, 6, 12);
  ends(2 * kLongest + 6, kLongest, 13);

  DataConfig data;
  data.kind = DataKind::kMegatron;
  data.path = (folder / "big").string();
  data.split = "1";
  constexpr int64_t kSequenceLength = 1 << 16;
  const auto source =
      make_token_source(data, {.sequence_length = kSequenceLength, .vocab_size = 20, .seed = 1, .samples_wanted = 1});
  REQUIRE(source->samples() == (kTokens - 1) / kSequenceLength);
  CHECK(contains(source->describe(), format("{} tokens (uint16) in 4 documents", kTokens)));

  // Where one sequence follows another in the shuffled order, their ends meet within a sample.
  const StoredArray<int32_t> lengths(index.lengths);
  const OrderArrays order = build_order(plan_order(lengths, kSequenceLength, 1, 1), lengths);
  int64_t begin = 0;
  for (size_t entry = 1; entry < 4; ++entry) {
    const int32_t before = order.document_index[entry - 1];
    const int32_t after = order.document_index[entry];
    begin += lengths[before];
    const auto sample = static_cast<uint32_t>(begin / kSequenceLength);
    const auto k = std::find(order.shuffle_index.begin(), order.shuffle_index.end(), sample);
    const auto tokens = sample_of(*source, k - order.shuffle_index.begin());
    const auto at = tokens.begin() + begin % kSequenceLength;
    INFO("sequence " << after << " after " << before << ", at " << begin);
    REQUIRE(begin % kSequenceLength >= 2);
    CHECK(std::vector<int32_t>(at - 2, at + 2) == std::vector<int32_t>{2, 10 + before, 10 + after, 1});
  }
}

TEST_CASE("the tokens of a Megatron dataset past 4 GiB, sample by sample") {
  const TemporaryFolder folder;
  // One-byte tokens. The training split is the last four sequences, which lie past 2^32 bytes.
  const std::vector<int32_t> lengths = {static_cast<int32_t>(kLongest), static_cast<int32_t>(kLongest), 4, 3, 5, 2, 3};
  constexpr int64_t kTokens = 2 * kLongest + 17;
  SparseFile file(folder, "big.bin", kTokens);
  if (!file.is_sparse) return;
  folder.write("big.idx", IndexBytes::of(lengths, 1, 1).bytes());
  std::vector<uint8_t> last(13);
  for (size_t i = 0; i < last.size(); ++i) last[i] = static_cast<uint8_t>(i + 1);
  file.write<uint8_t>(kTokens - 13, last);

  DataConfig data;
  data.kind = DataKind::kMegatron;
  data.path = (folder / "big").string();
  data.split = "3, 4";  // 3 and 4 of 7 sequences
  const auto source = make_token_source(
      data, {.split = Split::kValidation, .sequence_length = 4, .vocab_size = 20, .seed = 1, .samples_wanted = 3});
  REQUIRE(source->samples() == 3);
  std::vector<int32_t> run;  // the sequences in their shuffled order, from the samples in theirs
  const StoredArray<int32_t> part = StoredArray<int32_t>(lengths).part({3, std::ssize(lengths)});
  const OrderArrays order = build_order(plan_order(part, 4, 3, 1), part);
  for (const int32_t sequence : order.document_index) {
    constexpr std::array<int32_t, 4> kFirst = {0, 3, 8, 10};
    for (int32_t i = 0; i < part[sequence]; ++i) run.push_back(kFirst.at(static_cast<size_t>(sequence)) + i + 1);
  }
  for (int64_t k = 0; k < 3; ++k) {
    const auto first = run.begin() + order.shuffle_index[static_cast<size_t>(k)] * 4;
    CHECK(sample_of(*source, k) == std::vector<int32_t>(first, first + 5));
  }
}
