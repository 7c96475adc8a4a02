#include "data/flat_tokens.h"

#include <numeric>
#include <vector>

#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

std::string llmc_file(int32_t magic, int32_t version, int32_t count, const std::string& payload) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return bytes_of(header) + payload;
}

template <class T>
std::vector<T> counting(size_t count) {
  std::vector<T> values(count);
  std::iota(values.begin(), values.end(), T{0});
  return values;
}

DataConfig tokens_config(const std::string& path, const std::string& token_dtype = "") {
  DataConfig data;
  data.kind = DataKind::kTokens;
  data.path = path;
  data.token_dtype = token_dtype;
  return data;
}

constexpr TokenRequest kRequest{.sequence_length = 4, .vocab_size = 1000};
constexpr TokenRequest kValidation{.split = Split::kValidation, .sequence_length = 4, .vocab_size = 1000};

}  // namespace

TEST_CASE("samples of a flat file consume S tokens and share one") {
  const TemporaryFolder folder;
  for (const bool wide : {false, true}) {
    // 13 tokens = 3 samples of 4 and the last label; a 14th token changes nothing.
    for (const size_t count : {13u, 14u, 16u}) {
      const auto path =
          folder.write("a.bin", wide ? bytes_of(counting<uint32_t>(count)) : bytes_of(counting<uint16_t>(count)));
      const auto source = make_token_source(tokens_config(path, wide ? "uint32" : "uint16"), kRequest);
      REQUIRE(source->samples() == 3);
      CHECK(sample_of(*source, 0) == std::vector<int32_t>{0, 1, 2, 3, 4});
      CHECK(sample_of(*source, 1) == std::vector<int32_t>{4, 5, 6, 7, 8});
      CHECK(sample_of(*source, 2) == std::vector<int32_t>{8, 9, 10, 11, 12});
    }
  }
  const auto path = folder.write("b.bin", bytes_of(counting<uint16_t>(17)));
  CHECK(make_token_source(tokens_config(path, "uint16"), kRequest)->samples() == 4);
}

TEST_CASE("llm.c files are recognised by their header") {
  const TemporaryFolder folder;
  const auto gpt2 = folder.write("gpt2.bin", llmc_file(20240520, 1, 9, bytes_of(counting<uint16_t>(9))));
  const auto llama = folder.write("llama.bin", llmc_file(20240801, 7, 9, bytes_of(counting<uint32_t>(9))));
  for (const auto& [path, type] : {std::pair{gpt2, "uint16"}, std::pair{llama, "uint32"}}) {
    for (const std::string token_dtype : {"", type}) {
      const auto source = make_token_source(tokens_config(path, token_dtype), kRequest);
      CHECK(source->samples() == 2);
      CHECK(sample_of(*source, 1) == std::vector<int32_t>{4, 5, 6, 7, 8});
      CHECK(contains(source->describe(), std::string("9 tokens (") + type));
    }
  }
}

TEST_CASE("a bad llm.c header is refused") {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& bytes, const std::string& token_dtype = "") {
    return make_token_source(tokens_config(folder.write("a.bin", bytes), token_dtype), kRequest);
  };
  const auto payload = bytes_of(counting<uint16_t>(9));
  require_error(ErrorKind::kData, {"magic 20240520 with version 2"}, [&] { open(llmc_file(20240520, 2, 9, payload)); });
  require_error(ErrorKind::kData, {"magic 20240801 with version 1"}, [&] { open(llmc_file(20240801, 1, 9, payload)); });
  require_error(ErrorKind::kData, {"10 uint16 tokens, which makes 1044 bytes, but the file has 1042"},
                [&] { open(llmc_file(20240520, 1, 10, payload)); });
  require_error(ErrorKind::kData, {"but the file has 1042"}, [&] { open(llmc_file(20240520, 1, 8, payload)); });
  require_error(ErrorKind::kData, {"-9 uint16 tokens"}, [&] { open(llmc_file(20240520, 1, -9, payload)); });
  require_error(ErrorKind::kData, {"only 1000"}, [&] { open(llmc_file(20240520, 1, 9, payload).substr(0, 1000)); });
  require_error(ErrorKind::kConfig, {"says uint16"}, [&] { open(llmc_file(20240520, 1, 9, payload), "uint32"); });
}

TEST_CASE("the token type of a file without header is never guessed") {
  const TemporaryFolder folder;
  const auto path = folder.write("a.bin", bytes_of(counting<uint16_t>(20)));
  require_error(ErrorKind::kConfig, {"data.token_dtype is missing"},
                [&] { make_token_source(tokens_config(path), kRequest); });
  require_error(ErrorKind::kConfig, {"must be uint16 or uint32"},
                [&] { make_token_source(tokens_config(path, "int64"), kRequest); });
  const auto odd = folder.write("odd.bin", bytes_of(counting<uint16_t>(21)));
  require_error(ErrorKind::kData, {"42 bytes after a header of 0 are not a whole number of uint32 tokens"},
                [&] { make_token_source(tokens_config(odd, "uint32"), kRequest); });
}

TEST_CASE("a file that cannot be read is named") {
  const TemporaryFolder folder;
  require_error(ErrorKind::kData, {"none.bin: cannot be opened: No such file"},
                [&] { make_token_source(tokens_config((folder / "none.bin").string(), "uint16"), kRequest); });
  require_error(ErrorKind::kData, {"empty.bin: the train split has 0 of 0 tokens"},
                [&] { make_token_source(tokens_config(folder.write("empty.bin", ""), "uint16"), kRequest); });
  require_error(ErrorKind::kData, {"not a regular file"},
                [&] { make_token_source(tokens_config(folder.path().string(), "uint16"), kRequest); });
  require_error(ErrorKind::kConfig, {"data.path is missing"},
                [&] { make_token_source(tokens_config("", "uint16"), kRequest); });
}

TEST_CASE("a token file that shrinks while it is read is told with both sizes") {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.bin", bytes_of(counting<uint16_t>(100)));
  const auto source = make_token_source(tokens_config(path, "uint16"), kRequest);
  CHECK(sample_of(*source, 20)[0] == 80);
  std::filesystem::resize_file(path, 170);
  CHECK(sample_of(*source, 20)[0] == 80);  // what is still there can be read
  require_error(ErrorKind::kData, {path + ": the file has shrunk: 200 bytes when it was opened, 170 now"},
                [&] { sample_of(*source, 21); });
  std::filesystem::resize_file(path, 0);
  require_error(ErrorKind::kData, {path + ": the file has shrunk: 200 bytes when it was opened, 0 now"},
                [&] { sample_of(*source, 0); });
}

TEST_CASE("the tail of a flat file is kept for validation") {
  const TemporaryFolder folder;
  auto data = tokens_config(folder.write("a.bin", bytes_of(counting<uint16_t>(100))), "uint16");
  data.validation_fraction = 0.105;  // 10 tokens
  const auto train = make_token_source(data, kRequest);
  const auto validation = make_token_source(data, kValidation);
  CHECK(train->samples() == 22);  // tokens [0, 90)
  CHECK(sample_of(*train, 21).back() == 88);
  CHECK(validation->samples() == 2);  // tokens [90, 100)
  CHECK(sample_of(*validation, 0) == std::vector<int32_t>{90, 91, 92, 93, 94});
  CHECK(sample_of(*validation, 1) == std::vector<int32_t>{94, 95, 96, 97, 98});
  CHECK(contains(validation->describe(), "validation split is tokens [90, 100), 2 samples"));
}

TEST_CASE("a split too short for one sample says how many tokens it needs") {
  const TemporaryFolder folder;
  auto data = tokens_config(folder.write("a.bin", bytes_of(counting<uint16_t>(100))), "uint16");
  require_error(ErrorKind::kConfig, {"data.validation_fraction is 0"}, [&] { make_token_source(data, kValidation); });
  data.validation_fraction = 0.049;
  require_error(ErrorKind::kData,
                {"the validation split has 4 of 100 tokens (data.validation_fraction = 0.049), but one sample needs "
                 "train.sequence_length + 1 = 5"},
                [&] { make_token_source(data, kValidation); });
  data.validation_fraction = 0.05;
  CHECK(make_token_source(data, kValidation)->samples() == 1);
  data.validation_fraction = 0.96;
  require_error(ErrorKind::kData, {"the train split has 4 of 100 tokens"}, [&] { make_token_source(data, kRequest); });
  data.path = folder.write("b.bin", bytes_of(counting<uint16_t>(4)));
  data.validation_fraction = 0.0;
  require_error(ErrorKind::kData, {"the train split has 4 of 4 tokens"}, [&] { make_token_source(data, kRequest); });
}

TEST_CASE("an id outside the vocabulary is an error that names file, position and id") {
  const TemporaryFolder folder;
  auto tokens = counting<uint32_t>(13);
  const auto open = [&](uint32_t id) {
    tokens[6] = id;
    return make_token_source(tokens_config(folder.write("a.bin", bytes_of(tokens)), "uint32"), kRequest);
  };
  CHECK(sample_of(*open(999), 1)[2] == 999);
  for (const uint32_t id : {1000u, 0x80000000u, 0xffffffffu}) {
    const auto source = open(id);
    CHECK(sample_of(*source, 0).size() == 5);  // the sample before it is good
    require_error(ErrorKind::kData, {"a.bin: token 6 has id " + std::to_string(id)}, [&] { sample_of(*source, 1); });
    CHECK(contains(error_of([&] { sample_of(*source, 1); })->hint(), "model.vocab_size"));
  }
  // In an llm.c file the position counts tokens too, not the header.
  const auto llmc = folder.write("llmc.bin", llmc_file(20240520, 1, 6, bytes_of<uint16_t>({1, 2, 3, 4000, 5, 6})));
  require_error(ErrorKind::kData, {"token 3 has id 4000, outside the vocabulary [0, 1000)"},
                [&] { sample_of(*make_token_source(tokens_config(llmc), kRequest), 0); });
}
