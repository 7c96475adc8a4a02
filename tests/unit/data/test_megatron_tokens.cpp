#include "data/megatron_tokens.h"

#include <numeric>

#include "data_files.h"
#include "support/catch.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr TokenRequest kRequest{.sequence_length = 4, .vocab_size = 26, .seed = 1234, .samples_wanted = 6};

// Sequences of 5, 3, 7, 2 and 9 tokens, numbered 0 to 25 through the whole file.
template <class T>
DataConfig write_dataset(const TemporaryFolder& folder, uint8_t type, const std::string& split) {
  std::vector<T> tokens(26);
  std::iota(tokens.begin(), tokens.end(), T{0});
  folder.write("corpus.bin", bytes_of(tokens));
  folder.write("corpus.idx", IndexBytes::of({5, 3, 7, 2, 9}, type, sizeof(T)).bytes());
  DataConfig data;
  data.kind = DataKind::kMegatron;
  data.path = (folder / "corpus").string();
  data.split = split;
  return data;
}

template <class T>
void check_samples(uint8_t type) {
  const TemporaryFolder folder;
  const auto source = make_token_source(write_dataset<T>(folder, type, "1"), kRequest);
  REQUIRE(source->samples() == 6);
  // Sequences in the order 4 0 1 2 3, samples in the order 5 2 3 1 0 4 (B.14 of the vectors in test_megatron_order).
  CHECK(sample_of(*source, 0) == std::vector<int32_t>{11, 12, 13, 14, 15});
  CHECK(sample_of(*source, 1) == std::vector<int32_t>{25, 0, 1, 2, 3});
  CHECK(sample_of(*source, 2) == std::vector<int32_t>{3, 4, 5, 6, 7});
  CHECK(sample_of(*source, 3) == std::vector<int32_t>{21, 22, 23, 24, 25});
  CHECK(sample_of(*source, 4) == std::vector<int32_t>{17, 18, 19, 20, 21});
  CHECK(sample_of(*source, 5) == std::vector<int32_t>{7, 8, 9, 10, 11});
}

}  // namespace

TEST_CASE("samples of a Megatron dataset, for every integer type") {
  check_samples<uint8_t>(1);
  check_samples<int8_t>(2);
  check_samples<int16_t>(3);
  check_samples<int32_t>(4);
  check_samples<int64_t>(5);
  check_samples<uint16_t>(8);
}

TEST_CASE("a Megatron dataset that is read once has one epoch, whatever is wanted, and the same order in it") {
  const TemporaryFolder folder;
  const auto data = write_dataset<uint16_t>(folder, 8, "1");
  TokenRequest request = kRequest;
  const auto known = make_token_source(data, request);  // of 6 samples in one epoch
  request.once = true;
  for (const int64_t wanted : {1, 6, 7, 50}) {
    request.samples_wanted = wanted;
    const auto once = make_token_source(data, request);
    REQUIRE(once->samples() == 6);
    for (int64_t k = 0; k < 6; ++k) CHECK(sample_of(*once, k) == sample_of(*known, k));
  }
  request.sequence_length = 26;
  require_error(ErrorKind::kData, {data.path + " has less than one sample of train.sequence_length + 1 = 27 tokens"},
                {"data.split"}, [&] { make_token_source(data, request); });
}

TEST_CASE("the validation split of a Megatron dataset reads its own sequences only") {
  const TemporaryFolder folder;
  const auto data = write_dataset<uint16_t>(folder, 8, "2, 2, 1");  // sequences 2 and 3: tokens 8 to 16
  TokenRequest request = kRequest;
  request.split = Split::kValidation;
  request.samples_wanted = 2;
  const auto source = make_token_source(data, request);
  REQUIRE(source->samples() == 2);
  for (int64_t k = 0; k < 2; ++k) {
    for (const int32_t token : sample_of(*source, k)) CHECK((token >= 8 && token < 17));
  }
  CHECK(contains(source->describe(),
                 "corpus.bin: 26 tokens (uint16) in 5 documents; validation split is sequences "
                 "[2, 4), 2 samples"));
}

TEST_CASE("a Megatron .bin that does not fit its .idx is refused") {
  const TemporaryFolder folder;
  auto data = write_dataset<uint16_t>(folder, 8, "1");
  folder.write("corpus.bin", std::string(50, '\0'));
  require_error(ErrorKind::kData, {"26 uint16 tokens, which makes 52 bytes, but the file has 50"},
                [&] { make_token_source(data, kRequest); });
  std::filesystem::remove((folder / "corpus.bin").string());
  require_error(ErrorKind::kData, {"corpus.bin: cannot be opened: No such file"},
                [&] { make_token_source(data, kRequest); });
  std::filesystem::remove(folder / "corpus.idx");
  for (const char* ending : {"", ".bin", ".idx"}) {
    DataConfig named = data;
    named.path += ending;
    require_error(ErrorKind::kData, {"corpus.idx: cannot be opened: No such file"}, {"data.path"},
                  [&] { make_token_source(named, kRequest); });
  }
}

TEST_CASE("a Megatron dataset may be named by either of its files") {
  const TemporaryFolder folder;
  auto data = write_dataset<uint16_t>(folder, 8, "1");
  const auto expected = sample_of(*make_token_source(data, kRequest), 0);
  for (const char* ending : {".bin", ".idx"}) {
    DataConfig named = data;
    named.path += ending;
    CHECK(sample_of(*make_token_source(named, kRequest), 0) == expected);
    named.blend = {{named.path}, {}};
    named.path.clear();
    CHECK(make_token_source(named, kRequest)->samples() > 0);
  }
  // A prefix that ends so itself.
  folder.write("a.bin.bin", folder.read("corpus.bin"));
  folder.write("a.bin.idx", folder.read("corpus.idx"));
  data.path = (folder / "a.bin").string();
  CHECK(sample_of(*make_token_source(data, kRequest), 0) == expected);
}

TEST_CASE("ids outside the vocabulary in a Megatron dataset") {
  const TemporaryFolder folder;
  const auto data = write_dataset<int32_t>(folder, 4, "1");
  TokenRequest request = kRequest;
  request.vocab_size = 25;
  const auto source = make_token_source(data, request);
  CHECK(sample_of(*source, 0).size() == 5);
  require_error(ErrorKind::kData, {"corpus.bin: token 25 has id 25, outside the vocabulary [0, 25)"},
                [&] { sample_of(*source, 1); });

  auto tokens = values_of<int32_t>(folder.read("corpus.bin"));
  tokens[11] = -1;
  folder.write("corpus.bin", bytes_of(tokens));
  require_error(ErrorKind::kData, {"token 11 has id -1"}, [&] { sample_of(*make_token_source(data, kRequest), 0); });
}
