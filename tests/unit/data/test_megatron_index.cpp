#include "data/megatron_index.h"

#include "data/megatron_split.h"
#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

// Three uint16 sequences of 3, 2 and 4 tokens; documents {0, 1} and {2}.
IndexBytes small_index() {
  IndexBytes index = IndexBytes::of({3, 2, 4}, 8, 2);
  index.documents = {0, 2, 3};
  return index;
}

std::string hex_of(const std::string& bytes) {
  std::string hex;
  for (const char c : bytes) hex += format("{:02x}", static_cast<unsigned char>(c));
  return hex;
}

std::vector<int32_t> lengths_of(const MegatronIndex& index, Range sequences) {
  return index.lengths().part(sequences).all();
}

}  // namespace

TEST_CASE("the index of a known dataset, byte by byte") {
  const std::string bytes = small_index().bytes();
  REQUIRE(bytes.size() == 94);
  REQUIRE(
      hex_of(bytes) ==
      "4d4d494449445800000100000000000000080300000000000000030000000000000003000000020000000400000000000000000000000600"
      "0000000000000a00000000000000000000000000000002000000000000000300000000000000");
  const TemporaryFolder folder;
  const MegatronIndex index(folder.write("a.idx", bytes));
  CHECK(index.type() == TokenType::kU16);
  CHECK(index.sequences() == 3);
  CHECK(index.documents() == 2);
  CHECK(index.tokens() == 9);
  CHECK(lengths_of(index, {0, 3}) == std::vector<int32_t>{3, 2, 4});
  CHECK(lengths_of(index, {1, 2}) == std::vector<int32_t>{2});
  CHECK(index.tokens_of(0) == Range{0, 3});
  CHECK(index.tokens_of(1) == Range{3, 5});
  CHECK(index.tokens_of(2) == Range{5, 9});
}

TEST_CASE("an index that ends anywhere but at its end is refused by name") {
  const TemporaryFolder folder;
  const std::string good = small_index().bytes();
  // The header ends at 34, the lengths at 46, the offsets at 70, the documents at 94.
  for (size_t size = 0; size < good.size(); ++size) {
    INFO(size << " bytes");
    const std::string reason = size < 34 ? "does not begin with MMIDIDX" : format("do not fit its {} bytes", size);
    require_error(ErrorKind::kData, {(folder / "a.idx").string() + ": ", reason},
                  [&] { MegatronIndex(folder.write("a.idx", good.substr(0, size))); });
  }
}

TEST_CASE("documents and sequences may be empty") {
  const TemporaryFolder folder;
  IndexBytes bytes = IndexBytes::of({0, 3, 0, 0, 4, 0}, 8, 2);
  bytes.documents = {0, 0, 2, 2, 2, 6, 6};
  const MegatronIndex index(folder.write("a.idx", bytes.bytes()));
  CHECK(index.documents() == 6);
  CHECK(index.tokens() == 7);
  CHECK(lengths_of(index, {0, 6}) == std::vector<int32_t>{0, 3, 0, 0, 4, 0});
  CHECK(index.tokens_of(3) == Range{3, 3});
  CHECK(index.tokens_of(4) == Range{3, 7});
  CHECK(index.tokens_of(5) == Range{7, 7});
}

TEST_CASE("a damaged index is refused with the reason") {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& bytes) { MegatronIndex(folder.write("a.idx", bytes)); };
  const auto damaged = [&](auto change) {
    IndexBytes index = small_index();
    change(index);
    open(index.bytes());
  };
  const std::string good = small_index().bytes();
  open(good);
  require_error(ErrorKind::kData, {"does not begin with MMIDIDX"}, [&] { damaged([](auto& i) { i.magic[0] = 'X'; }); });
  require_error(ErrorKind::kData, {"does not begin with MMIDIDX"}, [&] { open(good.substr(0, 33)); });
  require_error(ErrorKind::kData, {"version 2"}, [&] { damaged([](auto& i) { i.version = 2; }); });
  for (const int type : {0, 6, 7, 9, 255}) {
    require_error(ErrorKind::kData, {format("element type {}", type)},
                  [&] { damaged([&](auto& i) { i.type = static_cast<uint8_t>(type); }); });
  }
  require_error(ErrorKind::kData, {"do not fit its 93 bytes"}, [&] { open(good.substr(0, 93)); });
  require_error(ErrorKind::kData, {"do not fit its 95 bytes"}, [&] { open(good + "x"); });
  require_error(ErrorKind::kData, {"do not fit"}, [&] { open(std::string(good).replace(18, 8, 8, '\xff')); });
  require_error(ErrorKind::kData, {"do not fit"}, [&] { open(std::string(good).replace(26, 8, 8, '\xff')); });
  require_error(ErrorKind::kData, {"sequence 1 has length -2"}, [&] { damaged([](auto& i) { i.lengths[1] = -2; }); });
  require_error(ErrorKind::kData, {"a.idx: sequence 0 begins at byte -2, but those before it end at byte 0"},
                [&] { damaged([](auto& i) { i.offsets[0] = -2; }); });
  require_error(ErrorKind::kData, {"a.idx: sequence 2 begins at byte 10, but those before it end at byte 12"},
                [&] { damaged([](auto& i) { i.lengths[1] = 3; }); });
  require_error(ErrorKind::kData, {"sequence 2 begins at byte 4294967306,"},
                [&] { damaged([](auto& i) { i.offsets[2] += int64_t{1} << 32; }); });
  require_error(ErrorKind::kData, {"a.idx: document 1 begins at sequence -1"},
                [&] { damaged([](auto& i) { i.documents[1] = -1; }); });
  require_error(ErrorKind::kData, {"sequence 2 begins at byte 12, but those before it end at byte 10"},
                [&] { damaged([](auto& i) { i.offsets[2] = 12; }); });
  require_error(ErrorKind::kData, {"number of sequences, 3"}, [&] { damaged([](auto& i) { i.documents[2] = 2; }); });
  require_error(ErrorKind::kData, {"must run from 0"}, [&] { damaged([](auto& i) { i.documents[0] = 1; }); });
  require_error(ErrorKind::kData, {"must run from 0"}, [&] { damaged([](auto& i) { i.documents.clear(); }); });
  require_error(ErrorKind::kData, {"document 2 begins at sequence 2"}, [&] {
    damaged([](auto& i) { i.documents = {0, 3, 2, 3}; });
  });
  require_error(ErrorKind::kData, {"no sequences"}, [&] { open(IndexBytes::of({}, 8, 2).bytes()); });
}

TEST_CASE("split weights divide the sequences as Megatron does") {
  CHECK(split_sequences("969, 30, 1", 0, 1000) == Range{0, 969});
  CHECK(split_sequences("969, 30, 1", 1, 1000) == Range{969, 999});
  CHECK(split_sequences("969, 30, 1", 2, 1000) == Range{999, 1000});
  CHECK(split_sequences("99,1,0", 0, 12345) == Range{0, 12222});
  CHECK(split_sequences("99,1,0", 1, 12345) == Range{12222, 12345});
  CHECK(split_sequences("1,1,1", 0, 100000) == Range{0, 33333});
  CHECK(split_sequences("1,1,1", 1, 100000) == Range{33333, 66667});
  CHECK(split_sequences("1,1,1", 2, 100000) == Range{66667, 100000});
  CHECK(split_sequences("1", 0, 7) == Range{0, 7});
  CHECK(split_sequences(".5 0.5", 1, 7) == Range{4, 7});
  CHECK(split_sequences("90 10", 1, 1000) == Range{900, 1000});
  // Halves go to the even neighbour.
  CHECK(split_sequences("1,1", 0, 5) == Range{0, 2});
  CHECK(split_sequences("1,1", 1, 5) == Range{2, 5});
  CHECK(split_sequences("1,1", 0, 3) == Range{0, 2});
}

TEST_CASE("an unusable split is refused") {
  require_error(ErrorKind::kData, {"no sequence of 12345 for part 3"}, [&] { split_sequences("99,1,0", 2, 12345); });
  require_error(ErrorKind::kData, {"no sequence of 3 for part 2"}, [&] { split_sequences("969, 30, 1", 1, 3); });
  require_error(ErrorKind::kConfig, {"data.split = \"9e1,10\": only numbers"},
                [&] { split_sequences("9e1,10", 0, 9); });
}
