#include "data/document_end.h"

#include "config/document_end.h"
#include "config/key_table.h"
#include "config/presets.h"
#include "data/sidecar.h"
#include "data_files.h"
#include "support/catch.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr const char* kSidecar = R"({"dtype": "uint16", "vocab_size": 257, "eod_id": 256, "tokens": 20})";

std::vector<uint16_t> text_of(int64_t tokens, uint16_t value = 1) {
  return std::vector<uint16_t>(static_cast<size_t>(tokens), value);
}

// A run with documents on a flat file of 20 tokens.
Config config_for(const TemporaryFolder& folder, const std::string& sidecar, int64_t vocab_size = 300) {
  Config config;
  config.model.vocab_size = vocab_size;
  config.data.kind = DataKind::kTokens;
  config.data.path = folder.write("a.bin", bytes_of(text_of(20)));
  if (!sidecar.empty()) folder.write("a.bin.json", sidecar);
  config.data.reset_at_eod = true;
  return config;
}

int64_t settled(Config config) {
  settle_eod_id(config);
  return config.data.eod_id;
}

Config preset(const std::string& name) {
  Config config;
  config.model = preset_model(name);
  config.data.eod_mask_loss = true;
  return config;
}

}  // namespace

TEST_CASE("a run without documents settles nothing") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "damaged");
  config.data.reset_at_eod = false;
  CHECK(settled(config) == -1);
}

TEST_CASE("presets know what separates documents, not the last token of the vocabulary") {
  CHECK(settled(preset("qwen3-0.6b")) == 151643);
  CHECK(settled(preset("qwen3-32b")) == 151643);
  CHECK(settled(preset("gemma4-e2b")) == 1);
  Config config = preset("qwen3-0.6b");
  settle_eod_id(config);
  CHECK(contains(to_yaml(config), "  eod_id: 151643\n"));
  config.model.vocab_size = 257;  // then the tokenizer is another one
  config.data.eod_id = -1;
  require_error(ErrorKind::kConfig, {"data.eod_mask_loss needs data.eod_id"}, {"tools/tokenise"},
                [&] { settled(config); });
}

TEST_CASE("without any source documents need an id") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "");
  require_error(ErrorKind::kConfig, {"data.reset_at_eod needs data.eod_id"}, {"set data.eod_id"},
                [&] { settled(config); });
  config.data.eod_id = 7;
  CHECK(settled(config) == 7);
  config.data = {};
  config.data.eod_mask_loss = true;  // of mock tokens
  require_error(ErrorKind::kConfig, {"data.eod_mask_loss needs data.eod_id"}, {"set data.eod_id"},
                [&] { settled(config); });
}

TEST_CASE("the file beside the tokens comes first, and must agree with the config") {
  const TemporaryFolder folder;
  Config config = config_for(folder, kSidecar);
  CHECK(settled(config) == 256);
  config.data.eod_id = 256;
  CHECK(settled(config) == 256);
  config.data.eod_id = 7;
  require_error(ErrorKind::kConfig, {"data.eod_id = 7, but " + config.data.path + ".json says", "token 256"}, {"auto"},
                [&] { settled(config); });
  config.data.eod_id = -1;
  config.model = preset_model("qwen3-0.6b");
  CHECK(settled(config) == 256);
  config.model = {};
  config.model.vocab_size = 256;
  require_error(ErrorKind::kConfig, {"documents end with token 256", "no token of model.vocab_size = 256"},
                {"tokenizer"}, [&] { settled(config); });
}

TEST_CASE("the sources of a blend end documents with one token") {
  const TemporaryFolder folder;
  Config config = config_for(folder, kSidecar);
  const std::string a = config.data.path;
  const std::string b = folder.write("b.bin", bytes_of(text_of(20)));
  config.data.path.clear();
  config.data.blend = {{b, a}, {}};
  CHECK(settled(config) == 256);  // b does not say
  folder.write("b.bin.json", R"({"eod_id": 0})");
  require_error(ErrorKind::kConfig, {"token 0 as " + b + ".json says", "256 as " + a + ".json says"}, {"one tokenizer"},
                [&] { settled(config); });
  config.data.kind = DataKind::kMegatron;
  config.data.blend = {{(folder / "a").string(), a}, {}};  // the prefix, and the .bin
  CHECK(settled(config) == 256);
}

TEST_CASE("a Hugging Face folder tells the end of a document") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "");
  config.model.hf_path = folder.path().string();
  const auto refused = [&] {
    require_error(ErrorKind::kConfig, {"data.reset_at_eod needs data.eod_id"}, [&] { settled(config); });
  };
  refused();
  folder.write("generation_config.json", R"({"eos_token_id": [9]})");
  CHECK(settled(config) == 9);
  folder.write("generation_config.json", R"({"eos_token_id": [9, 10]})");  // which of them is not said
  refused();
  folder.write("config.json", R"({"text_config": {"eos_token_id": 4}})");
  CHECK(settled(config) == 4);
  folder.write("config.json", R"({"eos_token_id": 5, "text_config": {"eos_token_id": 4}})");
  CHECK(settled(config) == 5);
  folder.write("tokenizer.json", R"({"added_tokens": [{"id": 2, "content": "<eos>"}, {"id": 3, "content": "<bos>"},
                                     {"id": 6, "content": "<|endoftext|>"}, {"id": 8, "content": "<|im_end|>"}]})");
  CHECK(settled(config) == 6);
  config.data.eod_id = 5;  // of the config alone: the model only suggests
  CHECK(settled(config) == 5);
  config.data.eod_id = -1;
  folder.write("tokenizer.json", "{");
  require_error(ErrorKind::kConfig, {"tokenizer.json"}, [&] { settled(config); });
  // An instruct release: its answers end with another token than its documents.
  config.model.family = "qwen3";
  config.model.vocab_size = 151936;
  folder.write("config.json", R"({"eos_token_id": 151645})");
  std::filesystem::remove(folder / "tokenizer.json");
  CHECK(settled(config) == 151643);
  // A model of the same size with a tokenizer of its own.
  folder.write("tokenizer.json", R"({"added_tokens": [{"id": 151645, "content": "<|endoftext|>"}]})");
  CHECK(settled(config) == 151645);
}

TEST_CASE("a tokenizer.json may be large, a config.json not") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "");
  config.model.hf_path = folder.path().string();
  const std::string filler = R"(", "x": ")" + std::string(40'000'000, 'x') + "\"}";
  folder.write("tokenizer.json", R"({"added_tokens": [{"id": 6, "content": "<eos>"}], "a": ")" + filler);
  CHECK(settled(config) == 6);
  std::filesystem::remove(folder / "tokenizer.json");
  folder.write("config.json", R"({"eos_token_id": 5, "a": ")" + filler);
  require_error(ErrorKind::kConfig, {"config.json: 400", "bytes, where at most 1048576 are expected"},
                [&] { settled(config); });
}

TEST_CASE("tokens without an end of document are warned of, wherever they are read from first") {
  const TemporaryFolder folder;
  DataConfig data;
  data.kind = DataKind::kTokens;
  data.token_dtype = "uint16";
  data.reset_at_eod = true;
  data.eod_id = 9;
  const auto warning = [&](const std::vector<uint16_t>& tokens, int64_t first, int64_t count) {
    data.path = folder.write("t.bin", bytes_of(tokens));
    const auto source = make_token_source(data, {.sequence_length = 1000, .vocab_size = 20});
    return warn_of_no_document_end(data, *source, Sampler(SampleOrder::kSequential, source->samples(), 1), first,
                                   count);
  };
  auto tokens = text_of(2'000'001);
  CHECK(contains(warning(tokens, 0, 5000), "no document ends (data.eod_id 9) in the first 1000000 tokens"));
  CHECK(contains(warning(tokens, 0, 3), "in the first 3000 tokens"));
  CHECK(warning(tokens, 0, 0).empty());
  tokens[999'500] = 9;
  CHECK(warning(tokens, 0, 5000).empty());
  CHECK(!warning(tokens, 0, 999).empty());
  CHECK(!warning(tokens, 1000, 5000).empty());  // as after a resume
  CHECK(warning(tokens, 2500, 5000).empty());   // in the second epoch
  data.eod_id = 1;
  CHECK(warning(tokens, 0, 5000).empty());
  data.eod_id = 8;
  data.reset_at_eod = false;
  CHECK(warning(tokens, 0, 5000).empty());
}

TEST_CASE("a token file whose name leaves no room for .json has no sidecar") {
  const TemporaryFolder folder;
  const std::string path = folder.write(std::string(248, 'a') + ".bin", bytes_of(text_of(20)));
  CHECK_FALSE(read_sidecar(path).has_value());
}

TEST_CASE("a sidecar settles the type of a flat file, and must be of it") {
  const TemporaryFolder folder;
  DataConfig data;
  data.kind = DataKind::kTokens;
  const auto write = [&](const std::string& sidecar) {
    data.path = folder.write("t.bin", bytes_of(std::vector<uint32_t>{1, 70'000, 3, 4, 5, 6}));
    folder.write("t.bin.json", sidecar);
  };
  const TokenRequest request{.sequence_length = 4, .vocab_size = 100'000};
  const auto open = [&] { return make_token_source(data, request); };
  write(R"({"dtype": "uint32", "vocab_size": 80000, "tokens": 6, "documents": 1, "by": "others"})");
  CHECK(sample_of(*open(), 0) == std::vector<int32_t>{1, 70'000, 3, 4, 5});
  CHECK(open()->inputs().size() == 2);
  data.token_dtype = "uint16";
  require_error(ErrorKind::kConfig, {data.path + ".json: says uint32, but data.token_dtype is uint16"},
                {"leave data.token_dtype out"}, open);
  data.token_dtype.clear();
  write(R"({"dtype": "uint32", "tokens": 7})");
  require_error(ErrorKind::kData, {"t.bin.json: ", "has 7 tokens, but the file holds 6"}, {"tools/tokenise"}, open);
  write(R"({"dtype": "uint32", "vocab_size": 100001})");
  require_error(ErrorKind::kData, {"t.bin.json", "a vocabulary of 100001, but model.vocab_size is 100000"},
                {"tokenizer"}, open);
  write(R"({"dtype": "float"})");
  require_error(ErrorKind::kData, {"t.bin.json: dtype is float"}, {"convert"}, open);
  for (const char* damaged : {"", "{", "[]", R"({"dtype": 5})", R"({"tokens": -1})", R"({"eod_id": "x"})"}) {
    INFO(damaged);
    write(damaged);
    require_error(ErrorKind::kData, {"t.bin.json"}, open);
  }
}

TEST_CASE("uint16 for a vocabulary past 65536 is refused, unless the file itself vouches for it") {
  const TemporaryFolder folder;
  DataConfig data;
  data.kind = DataKind::kTokens;
  data.token_dtype = "uint16";
  data.path = folder.write("t.bin", bytes_of(std::vector<uint32_t>{1, 2, 3, 4, 5, 6}));
  const auto open = [&](int64_t vocab_size) {
    return make_token_source(data, {.sequence_length = 4, .vocab_size = vocab_size});
  };
  CHECK(open(65536)->samples() == 2);
  require_error(ErrorKind::kConfig, {"data.token_dtype is uint16", "model.vocab_size is 65537", "t.bin"}, {"uint32"},
                [&] { open(65537); });
  folder.write("t.bin.json", R"({"dtype": "uint16"})");
  CHECK(open(151936)->samples() == 2);
}
