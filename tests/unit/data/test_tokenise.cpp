// tools/tokenise, from text to the samples that the trainer reads.
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>

#include "data/sidecar.h"
#include "data/token_source.h"
#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

struct Outcome {
  int exit_code;
  std::string text;  // stdout and stderr
};

// Runs the tool inside the folder.
Outcome tokenise(const TemporaryFolder& folder, const std::string& arguments) {
  const std::string command = format("cd '{}' && python3 '{}/tools/tokenise' {} >said 2>&1", folder.path().string(),
                                     INVAR_SOURCE_DIR, arguments);
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, folder.read("said")};
}

std::vector<int32_t> first_sample(const DataConfig& data, int64_t sequence_length, int64_t vocab_size) {
  const auto source = make_token_source(
      data, {.sequence_length = sequence_length, .vocab_size = vocab_size, .seed = 1, .samples_wanted = 1});
  std::vector<int32_t> tokens(static_cast<size_t>(sequence_length) + 1);
  source->read(0, tokens);
  return tokens;
}

const std::vector<int32_t> kAbCde = {'a', 'b', 256, 'c', 0xc3, 0xa9, 256};

}  // namespace

TEST_CASE("tokenise: bytes of files to an llm.c file") {
  const TemporaryFolder folder;
  folder.write("1.txt", "ab");
  folder.write("nothing.txt", "");
  folder.write("2.txt", "c\xc3\xa9");
  const auto outcome = tokenise(folder, "1.txt nothing.txt 2.txt --output out.bin");
  INFO(outcome.text);
  REQUIRE(outcome.exit_code == 0);
  CHECK(contains(outcome.text, "out.bin: 7 tokens in 2 documents, vocabulary 257, end-of-document 256"));
  CHECK(contains(outcome.text, "model: {vocab_size: 257}\ndata: {kind: tokens, path: \"out.bin\"}"));
  const std::string bytes = folder.read("out.bin");
  REQUIRE(bytes.size() == 1024 + 14);
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 7;
  CHECK(bytes.substr(0, 1024) == bytes_of(header));

  DataConfig data;
  data.kind = DataKind::kTokens;
  data.path = (folder / "out.bin").string();
  CHECK(first_sample(data, 6, 257) == kAbCde);
  const auto sidecar = read_sidecar(data.path);
  REQUIRE(sidecar.has_value());
  CHECK(sidecar->dtype == "uint16");
  CHECK(sidecar->vocab_size == 257);
  CHECK(sidecar->eod_id == 256);
  CHECK(sidecar->tokens == 7);
}

TEST_CASE("tokenise: JSON lines to a flat file and to Megatron's pair") {
  const TemporaryFolder folder;
  folder.write("in.jsonl", "{\"body\": \"ab\", \"id\": 1}\n\n{\"body\": \"\"}\n{\"body\": \"c\\u00e9\"}\n");
  const auto flat = tokenise(folder, "in.jsonl --jsonl body --format flat --output flat.bin");
  INFO(flat.text);
  REQUIRE(flat.exit_code == 0);
  CHECK(contains(flat.text, "path: \"flat.bin\", token_dtype: uint16"));
  CHECK(folder.read("flat.bin.json") ==
        "{\"dtype\": \"uint16\", \"vocab_size\": 257, \"eod_id\": 256, \"tokens\": 7, \"documents\": 2}\n");
  CHECK(folder.read("flat.bin") == bytes_of(std::vector<uint16_t>(kAbCde.begin(), kAbCde.end())));

  const auto megatron = tokenise(folder, "in.jsonl --jsonl body --format megatron --output pair.bin");
  INFO(megatron.text);
  REQUIRE(megatron.exit_code == 0);
  CHECK(contains(megatron.text, "data: {kind: megatron, path: \"pair\"}"));
  CHECK(folder.read("pair.bin") == folder.read("flat.bin"));
  CHECK(folder.read("pair.bin.json") == folder.read("flat.bin.json"));
  CHECK(folder.read("pair.idx") == IndexBytes::of({3, 4}, 8, 2).bytes());

  DataConfig data;
  data.kind = DataKind::kMegatron;
  data.path = (folder / "pair").string();
  data.split = "1, 0, 0";
  // Two documents in one of their two orders.
  const auto sample = first_sample(data, 6, 257);
  CHECK((sample == kAbCde || sample == std::vector<int32_t>{'c', 0xc3, 0xa9, 256, 'a', 'b', 256}));
}

TEST_CASE("tokenise: a long file keeps every byte across chunks") {
  const TemporaryFolder folder;
  std::string text(3'000'001, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  folder.write("long.txt", text);
  REQUIRE(tokenise(folder, "long.txt --format flat --output out.bin").exit_code == 0);
  const auto tokens = values_of<uint16_t>(folder.read("out.bin"));
  REQUIRE(tokens.size() == text.size() + 1);
  CHECK(std::equal(text.begin(), text.end(), tokens.begin(),
                   [](char c, uint16_t token) { return static_cast<unsigned char>(c) == token; }));
  CHECK(tokens.back() == 256);
}

TEST_CASE("tokenise: a tokenizer.json, or a clear word that its package is missing") {
  const TemporaryFolder folder;
  folder.write("in.txt", "hello big world");
  folder.write("tokenizer.json",
               R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [{"id": 70000,
    "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"hello": 0, "world": 1, "?": 2, "</s>": 70000}, "unk_token": "?"}})");
  const auto outcome = tokenise(folder, "in.txt --tokenizer tokenizer.json --output out.bin");
  INFO(outcome.text);
  if (std::system("python3 -c 'import tokenizers' 2>/dev/null") != 0) {
    CHECK(outcome.exit_code == 2);
    CHECK(contains(outcome.text, "needs the Python package 'tokenizers'"));
    return;
  }
  REQUIRE(outcome.exit_code == 0);
  DataConfig data;
  data.kind = DataKind::kTokens;
  data.path = (folder / "out.bin").string();
  CHECK(first_sample(data, 3, 70001) == std::vector<int32_t>{0, 2, 1, 70000});
}

TEST_CASE("tokenise: a mistake ends with one line, and leaves no output") {
  const TemporaryFolder folder;
  folder.write("ok.jsonl", "{\"text\": \"a\"}\n");
  folder.write("bad.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n");
  folder.write("empty.txt", "");
  const auto refuses = [&](const std::string& arguments, const std::string& message) {
    const auto outcome = tokenise(folder, format("{} --output out.bin", arguments));
    INFO(outcome.text);
    CHECK(outcome.exit_code == 2);
    CHECK(contains(outcome.text, message));
    CHECK_FALSE(contains(outcome.text, "Traceback"));
    CHECK_FALSE(std::filesystem::exists((folder / "out.bin").string()));
    CHECK_FALSE(std::filesystem::exists((folder / "out.bin.part").string()));
  };
  refuses("none.txt", "none.txt");
  refuses("empty.txt", "hold no text");
  refuses("ok.jsonl bad.jsonl --jsonl text --format megatron", "bad.jsonl:2: no JSON object with a text 'text'");
  refuses("ok.jsonl --jsonl body", "ok.jsonl:1");
  refuses("ok.jsonl --eod-token x", "--eod-token is for a tokenizer.json");
  CHECK(contains(tokenise(folder, "ok.jsonl --output out.txt").text, "--output must end in .bin"));
}
