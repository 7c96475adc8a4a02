#include <sys/stat.h>

#include "config/field.h"
#include "config/key_table.h"
#include "config/validation.h"
#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

constexpr const char* kSmall =
    R"(model: {vocab_size: 257, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4,
        num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32}
train:
  steps: 100
  sequence_length: 64
)";

// What the loader says about a file of this text.
void refuses(const std::string& text, const std::vector<std::string>& message, const std::vector<std::string>& hint) {
  INFO("file:\n" << text);
  require_error(ErrorKind::kConfig, message, hint, [&] { load_text(text); });
}

// A value of train.steps, parallel.sequence, ... that is refused; the key stands on line 2.
void refuses_value(const std::string& section, const std::string& key, const std::string& value,
                   const std::string& rule, const std::string& fix) {
  refuses(section + ":\n  " + key + ": " + value + "\n", {"c.yaml:2: " + section + "." + key + " " + rule}, {fix});
}

void refuses_argument(const std::string& argument, const std::string& rule, const std::string& fix) {
  require_error(ErrorKind::kConfig, {"argument " + argument + ": " + rule}, {fix},
                [&] { load_text(kSmall, {argument}); });
}

}  // namespace

TEST_CASE("keys that are not given keep their defaults") {
  const Config config = load_text("train: {steps: 5}\n");
  Config expected;
  expected.train.steps = 5;
  expected.origin = config.origin;
  CHECK(config == expected);
  REQUIRE(config.origin.size() == 2);  // and the file
  CHECK(contains(config.origin.at("train.steps"), "c.yaml:1"));
}

TEST_CASE("every type of value is read") {
  const Config config = load_text(R"(
parallel: {tensor: 4, sequence: true, data: auto}
numerics:
  precision: "fp32"
device: cpu
train: {seed: 18446744073709551615, steps: +10}
optimizer: {lr: 3e-4, eps: 1e-9, weight_decay: .5, clip_grad: 1, beta1: 0.85}
schedule: {kind: wsd, decay_steps: 90}
data: {path: "with: colon # and hash", split: 1, eod_id: 0}
checkpoint: {dir: ''}
)");
  CHECK(config.parallel.tensor == 4);
  CHECK(config.parallel.sequence);
  CHECK(config.parallel.data == 0);
  CHECK(config.numerics.precision == Precision::kF32);
  CHECK(config.device == DeviceChoice::kCpu);
  CHECK(config.train.seed == 18446744073709551615u);
  CHECK(config.train.steps == 10);
  CHECK(config.optimizer.lr == 3e-4);
  CHECK(config.optimizer.eps == 1e-9);
  CHECK(config.optimizer.weight_decay == 0.5);
  CHECK(config.optimizer.clip_grad == 1.0);
  CHECK(config.optimizer.beta1 == 0.85);
  CHECK(config.schedule.kind == ScheduleKind::kWsd);
  CHECK(config.schedule.decay_steps == 90);
  CHECK(config.data.path == "with: colon # and hash");
  CHECK(config.data.split == "1");
  CHECK(config.data.eod_id == 0);
}

TEST_CASE("lists, maps of lists and sections in sections are read") {
  const Config config = load_text(R"(
parallel:
  tensor: 8
  nonuniform:
    failed:
      - dp0.tp5
      - "node03.gpu2"
    speeds: [1.0, 0.8]
    reshare: true
    non_active_ranks_per_dp: {0: [2, 5], "1,0,0": []}
  spare: 1
)",
                                  {"parallel.nonuniform.tensor_widths=[8, 7]", "parallel.nonuniform.batch=shrink"});
  const NonuniformConfig& nonuniform = config.parallel.nonuniform;
  CHECK(config.parallel.tensor == 8);
  CHECK(config.parallel.spare == 1);
  CHECK(nonuniform.failed == std::vector<std::string>{"dp0.tp5", "node03.gpu2"});
  CHECK(nonuniform.tensor_widths == std::vector<int>{8, 7});
  CHECK(nonuniform.speeds == std::vector<double>{1.0, 0.8});
  CHECK(nonuniform.reshare);
  CHECK(nonuniform.batch == BatchPolicy::kShrink);
  CHECK(nonuniform.non_active_ranks_per_dp == IntegerLists{{"0", {2, 5}}, {"1,0,0", {}}});
  CHECK(contains(config.origin.at("parallel.nonuniform.speeds"), "c.yaml:8"));
  CHECK(contains(to_yaml(config), "  spare: 1\n  nonuniform:\n    failed: [dp0.tp5, node03.gpu2]\n"));
}

TEST_CASE("lists and maps that are none are refused") {
  refuses_argument("parallel.nonuniform.failed=dp0.tp1", "parallel.nonuniform.failed must be a list of texts",
                   "write failed: [first, second], or [] for none");
  refuses_argument("parallel.nonuniform.failed=[[dp0.tp1]]", "parallel.nonuniform.failed must be a list", "[first");
  refuses_argument("parallel.nonuniform.failed={0: [1]}", "parallel.nonuniform.failed must be a list", "[first");
  refuses_argument("parallel.nonuniform.failed=[~]", "parallel.nonuniform.failed must be a list", "[first");
  refuses_argument("parallel.nonuniform.failed=", "parallel.nonuniform.failed must be a list", "[] for none");
  refuses_argument("parallel.nonuniform.tensor_widths=[8, x]",
                   "parallel.nonuniform.tensor_widths has an item that must be an integer, not x", "whole number");
  refuses_argument("parallel.nonuniform.tensor_widths=[\"8\"]",
                   "parallel.nonuniform.tensor_widths has an item that is a quoted string", "write 8");
  const std::string map = "parallel.nonuniform.non_active_ranks_per_dp";
  refuses_argument(map + "=[2, 5]", map + " must be a map to lists of integers", "{0: [2, 5]}, or {} for none");
  refuses_argument(map + "={0: 2}", map + " must be a map", "{0: [2, 5]}");
  refuses_argument(map + "={0: [1], 0: [2]}", map + " names 0 twice", "keep one");
  refuses_argument("train.steps=[1]", "train.steps needs a single value, not a list", "write steps: integer");
  refuses_argument("parallel.nonuniform=3", "parallel.nonuniform is a section", "name a key of it: failed");
  refuses_argument("parallel.nonuniform.faild=[]", "unknown key parallel.nonuniform.faild",
                   "did you mean parallel.nonuniform.failed?");
  refuses_argument("failed=[]", "failed is not a section", "write it as parallel.nonuniform.failed");
  refuses("parallel:\n  nonuniform: 3\n", {"c.yaml:2: section parallel.nonuniform has no keys"}, {"failed"});
  refuses("parallel:\n  nonuniform:\n    speed: []\n", {"c.yaml:3: unknown key parallel.nonuniform.speed"},
          {"did you mean parallel.nonuniform.speeds?"});
}

TEST_CASE("Windows line ends are read") {
  CHECK(load_text("train:\r\n  steps: 7\r\n").train.steps == 7);
}

TEST_CASE("later sources win: defaults, preset, file, arguments") {
  CHECK(load_text("model: {preset: qwen3-0.6b}\n").model.hidden_size == 1024);
  CHECK(load_text("model: {hidden_size: 512, preset: qwen3-0.6b}\n").model.hidden_size == 512);
  const Config config =
      load_text("model: {preset: qwen3-0.6b, hidden_size: 512}\n", {"model.hidden_size=256", "model.rope_theta=5e6"});
  CHECK(config.model.hidden_size == 256);
  CHECK(config.model.rope_theta == 5e6);
  CHECK(config.model.num_hidden_layers == 28);
  CHECK(config.origin.at("model.hidden_size") == "argument model.hidden_size=256");

  const Config other = load_text("model: {preset: qwen3-0.6b}\n", {"model.preset=qwen3-4b"});
  CHECK(other.model.hidden_size == 2560);
  CHECK(load_text("model: {preset: qwen3-0.6b}\n", {"model.preset=\"\""}).model.hidden_size == 0);
}

TEST_CASE("hf_path stands where a preset stands") {
  const TemporaryFolder folder;
  folder.write("m/config.json",
               R"({"model_type": "qwen3", "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rope_theta": 5e6})");
  const std::string text = "model:\n  num_hidden_layers: 2\n  hf_path: " + folder.path().string() + "/m\n";
  const Config config = load_text(text, {"model.rope_theta=1e4"});
  CHECK(config.model.hidden_size == 48);
  CHECK(config.model.num_hidden_layers == 2);
  CHECK(config.model.rope_theta == 1e4);
  CHECK(config.model.hf_path == folder.path().string() + "/m");
  refuses(text + "  preset: qwen3-0.6b\n", {"c.yaml:4: model.preset qwen3-0.6b and model.hf_path", "both given"},
          {"keep one"});
  refuses("train: {steps: 1}\nmodel: {hf_path: /nowhere}\n",
          {"c.yaml:2: /nowhere/config.json: cannot be opened: No such file"}, {"Hugging Face model"});
}

TEST_CASE("a key that was given beside hf_path is named where it stands, others in config.json") {
  const TemporaryFolder folder;
  const std::string model = folder.path().string() + "/m";
  const auto refused = [&](int heads, const std::string& line, const std::vector<std::string>& arguments,
                           const std::string& message) {
    folder.write("m/config.json", format(R"({{"model_type": "qwen3", "vocab_size": 250, "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": {}, "num_key_value_heads": 4,
        "head_dim": 16, "rope_theta": 5e6}})",
                                         heads));
    const std::string text = "train: {steps: 9, sequence_length: 8}\nmodel:\n  hf_path: " + model + "\n" + line + "\n";
    INFO(text);
    require_error(ErrorKind::kConfig, {message}, {"use 1, 2"}, [&] { validate(load_text(text, arguments), 1); });
  };
  const std::string rule = "model.num_key_value_heads = 4 does not divide model.num_attention_heads = 6";
  refused(8, "  num_attention_heads: 6", {}, "c.yaml:4: " + rule);
  refused(8, "", {"model.num_attention_heads=6"}, "argument model.num_attention_heads=6: " + rule);
  refused(6, "", {}, model + "/config.json: " + rule);
}

TEST_CASE("preset and hf_path set the family") {
  CHECK(load_text("model: {preset: gemma4-e4b}\n").model.family == "gemma4");
  CHECK(load_text("model: {preset: gemma4-e4b, family: gemma4}\n").model.family == "gemma4");
  CHECK(load_text("model: {preset: qwen3-8b}\n").model.family == "qwen3");
  CHECK(load_text("model: {family: gemma4}\n").model.family == "gemma4");
  refuses("model:\n  preset: gemma4-e4b\n  family: qwen3\n",
          {"c.yaml:3: model.family qwen3 contradicts model.preset gemma4-e4b, which is gemma4"},
          {"remove model.family: model.preset sets it"});
  const std::string path = std::string(INVAR_SOURCE_DIR) + "/tests/reference/gemma4_e4b";
  const Config config = load_text("model: {hf_path: " + path + "}\n");
  CHECK(config.model.family == "gemma4");
  CHECK(config.model.layer_types == "sssssf");
  refuses("model:\n  hf_path: " + path + "\n  family: qwen3\n",
          {"c.yaml:3: model.family qwen3 contradicts model.hf_path " + path + ", which is gemma4"},
          {"remove model.family: model.hf_path sets it"});
}

TEST_CASE("files that are no config are refused") {
  require_error(ErrorKind::kConfig, {"no/such/file.yaml: cannot be opened: No such file"}, {"check the path"},
                [] { load_config("no/such/file.yaml"); });
  const TemporaryFolder folder;
  require_error(ErrorKind::kConfig, {"is a folder"}, {"name the YAML file"},
                [&] { load_config(folder.path().string()); });
  for (const char* text : {"", "\n\n", "# only a comment\n", "---\n", "~\n"}) {
    refuses(text, {"c.yaml: the config file is empty"}, {"configs/quickstart.yaml"});
  }
  refuses("train: {steps: 1}\n---\ntrain: {steps: 2}\n", {"c.yaml:2: a second YAML document begins here"},
          {"keep one"});
  refuses("- train\n- model\n", {"c.yaml: the file is not a map of sections"}, {"model, parallel"});
  refuses("just words\n", {"c.yaml: the file is not a map of sections"}, {"model, parallel"});
}

// yaml-cpp's own LoadAll never ends on these, and asks for memory without bound.
TEST_CASE("what follows the one document is refused with its line") {
  refuses("{train: {steps: 1}}, x\n", {"c.yaml:1: a second YAML document begins here"},
          {"a comma or bracket too many"});
  refuses("{train: {steps: 1}}\n\n]\n", {"c.yaml:3: not valid YAML: illegal flow end"}, {"bracket"});
  refuses(", x\n", {"c.yaml:1: a second YAML document begins here"}, {"a comma or bracket"});
  refuses("train: {steps: 1}\n...\n---\n---\n", {"c.yaml:3: a second YAML document begins here"}, {"remove the line"});
  refuses_argument("parallel.nonuniform.failed=[dp0.tp5],",
                   "parallel.nonuniform.failed: a second YAML document begins here", "a comma");
  refuses_argument("train.steps=5,", "train.steps must be an integer, not 5,", "whole number");
  refuses_argument("parallel.nonuniform.failed=[dp0.tp5]]", "parallel.nonuniform.failed: not valid YAML", "quote it");
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

TEST_CASE("YAML beyond any config is refused before it is built") {
  refuses("train:\n  steps: " + repeated("[", 100000), {"c.yaml:2: values inside one another, more than 16 deep"},
          {"unclosed bracket"});
  refuses(repeated("- ", 1000) + "x\n", {"c.yaml:1: values inside one another"}, {"unclosed bracket"});
  refuses("log:\n  dir: [" + repeated("a,", 200000) + "]\n", {"c.yaml:2: more than 200000 values"}, {"hundred"});
  refuses("# " + repeated("0123456789abcdef", 1 << 18) + "\n", {"c.yaml: 41943", "at most 4194304"}, {});
  // Nine values that hold nine values each, and so on: a billion of them.
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 9; ++i) bomb += format("a{}: &a{} [{}x]\n", i, i, repeated(format("*a{}, ", i - 1), 9));
  refuses(bomb, {"c.yaml:6: more than 200000 values", "aliases"}, {"hundred"});
  // Few values, but each is long.
  std::string long_text = "data: {blend: [&a \"" + repeated("x", 100000) + "\"";
  for (int i = 0; i < 10000; ++i) long_text += ", *a";
  refuses(long_text + "]}\n", {"c.yaml:1: more than 200000 values", "aliases"}, {"hundred"});
  refuses("train: &t {steps: *t}\n", {"c.yaml:1: an alias stands inside its own anchor"}, {"remove"});
}

TEST_CASE("an alias stands for the value of its anchor") {
  const Config config = load_text("train: {steps: &n 7, seed: *n}\n");
  CHECK(config.train.steps == 7);
  CHECK(config.train.seed == 7);
}

TEST_CASE("messages show what a user wrote short and without control characters") {
  refuses("\"tr\\x1b[2Jain\": {steps: 1}\n", {"c.yaml:1: unknown section tr\\x1b[2Jain"}, {});
  const Error error = require_error(ErrorKind::kConfig, {"argument train.steps=xxx", "must be an integer, not xxx"},
                                    [] { load_text(kSmall, {"train.steps=" + repeated("x", 100000)}); });
  CHECK(std::string(error.what()).size() < 500);
}

TEST_CASE("a config that is a pipe is refused at once") {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "c.yaml").string();
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  require_error(ErrorKind::kConfig, {"c.yaml: not a regular file"}, [&] { load_config(path); });
}

TEST_CASE("broken YAML is refused with its line") {
  refuses("train:\n\tsteps: 1\n", {"c.yaml:2: tab in the indentation"}, {"indent with spaces"});
  refuses("train:\n  seed: 1\n  \tsteps: 1\n", {"c.yaml:3: tab in the indentation"}, {"indent with spaces"});
  refuses("train:\n  steps: 1\n seed: 2\n", {"c.yaml:3: not valid YAML"}, {"indentation"});
  refuses("model: {family: qwen3\ntrain: {steps: 1}\n", {"c.yaml:2: not valid YAML"}, {"unclosed bracket"});
  refuses("train:\n  steps 1\n  seed: 2\n", {"c.yaml:3: not valid YAML"}, {"the one before"});
  refuses("log:\n  dir: \"runs\n", {"c.yaml:2: not valid YAML"}, {"quote"});
  refuses("log:\n  dir: \"runs\n  every: 5\n\n", {"c.yaml:3: not valid YAML"}, {"quote"});
  refuses("log:\n  dir: 'runs\n  every: 5\n\n", {"c.yaml:3: not valid YAML"}, {"quote"});
  // Tabs that do not indent are no mistake.
  CHECK(load_text("train:\n\t\n  # a\tb\n  steps:\t1\t# c\n").train.steps == 1);
}

TEST_CASE("unknown names are refused with the nearest known one") {
  refuses("train:\n  seed: 1\n  stpes: 5\n", {"c.yaml:3: unknown key train.stpes"}, {"did you mean train.steps?"});
  refuses("train:\n  global_batchsize: 5\n", {"unknown key train.global_batchsize"}, {"train.global_batch_size?"});
  refuses("trian:\n  steps: 5\n", {"c.yaml:1: unknown section trian"}, {"did you mean train?"});
  refuses("train:\n  zzzzzzzz: 5\n", {"c.yaml:2: unknown key train.zzzzzzzz"},
          {"the keys of train are steps, sequence_length, micro_batch_size"});
  refuses("zzzzzzzz: 5\n", {"c.yaml:1: unknown section zzzzzzzz"}, {"the sections are model, parallel", "device"});
  refuses("train:\n  lr: 1e-3\n", {"c.yaml:2: unknown key train.lr"}, {"did you mean optimizer.lr?"});
  refuses("train:\n  device: cpu\n", {"c.yaml:2: unknown key train.device"}, {"did you mean device?"});
  refuses("steps: 5\n", {"c.yaml:1: steps is not a section"}, {"write it as train.steps"});
  refuses("devise: cpu\n", {"c.yaml:1: unknown section devise"}, {"did you mean device?"});
  refuses("Train:\n  steps: 5\n", {"c.yaml:1: unknown section Train"}, {"did you mean train?"});
  refuses("? [a, b]\n: 1\n", {"c.yaml:1: the name of a key must be a word"}, {"key: value"});
}

TEST_CASE("names given twice are refused with both lines") {
  refuses("train:\n  steps: 1\n  seed: 3\n  steps: 2\n", {"c.yaml:4: train.steps is given twice, first at line 2"},
          {"keep one"});
  refuses("train: {steps: 1}\nlog: {every: 1}\ntrain: {seed: 2}\n", {"c.yaml:3: train is given twice, first at line 1"},
          {"keep one"});
  refuses("device: cpu\ndevice: cpu\n", {"c.yaml:2: device is given twice, first at line 1"}, {"keep one"});
  refuses("train: {steps: 1, steps: 1}\n", {"c.yaml:1: train.steps is given twice"}, {"keep one"});
}

TEST_CASE("sources of a blend are a text or a list, and are printed so that they are read back") {
  const auto load = [](const std::string& blend) { return load_text("data: {kind: tokens, blend: " + blend + "}\n"); };
  const std::vector<std::pair<std::string, Blend>> same = {
      {R"("0.7 a 0.3 b")", {{"a", "b"}, {0.7, 0.3}}},
      {R"([[0.7, "data/my web"], [3e-1, b]])", {{"data/my web", "b"}, {0.7, 0.3}}},
      {R"([0.7, "data/my web", 0.3, b])", {{"data/my web", "b"}, {0.7, 0.3}}},  // as Megatron's arguments
      {R"([data/my web, b])", {{"data/my web", "b"}, {}}},
      {R"(["1", b])", {{"1", "b"}, {}}},
      {R"([[2, 1]])", {{"1"}, {2}}},
      {R"([])", {}},
      {R"("")", {}},
  };
  for (const auto& [text, blend] : same) {
    INFO(text);
    const Config config = load(text);
    CHECK(config.data.blend == blend);
    CHECK(load_text(to_yaml(config)).data.blend == blend);
  }
  const auto argument = load_config_text("data: {kind: tokens}\n", "c.yaml",
                                         std::vector<std::string>{R"(data.blend=[[1, "a b"], [2, c]])"});
  CHECK(argument.data.blend == Blend{{"a b", "c"}, {1, 2}});
  const auto refuses_blend = [](const std::string& value, const std::string& why, const std::string& fix) {
    refuses("data:\n  blend: " + value + "\n", {"c.yaml:2: data.blend " + why}, {fix});
  };
  refuses_blend(R"("0 a 1 b")", R"(= "0 a 1 b": the weight 0 is not within)", "0.7 data/a 0.3 data/b");
  refuses_blend(R"("0.5")", R"(= "0.5": the last weight has no path)", "before every path");
  refuses_blend(R"("1 a b")", R"(= "1 a b": some paths have no weight)", "before every path");
  refuses_blend("[[0.7, a], b]", "= [...]: some paths have no weight", "before every path");
  refuses_blend("[[a, b]]", "= [...]: an item is neither a path nor a pair", "[[0.7, data/a]");
  refuses_blend("[[0.5, a, b]]", "= [...]: an item is neither a path nor a pair", "[[0.7, data/a]");
  refuses_blend("[a, '']", "= [...]: a path is empty", "before every path");
  refuses_blend("[{path: a}]", "must be a text, or a list", "[[0.7, data/a]");
  refuses_blend("[[[1, a]]]", "must be a text, or a list", "[[0.7, data/a]");
  refuses_blend("{a: 1}", "needs a single value, not keys", "blend: text");
}

TEST_CASE("the shape of a value must fit") {
  refuses("train:\n  steps: [1, 2]\n", {"c.yaml:2: train.steps needs a single value, not a list"}, {"steps: integer"});
  refuses("data:\n  split: [969, 30, 1]\n", {"c.yaml:2: data.split needs a single value"}, {"split: \"969, 30, 1\""});
  refuses("train:\n  steps: {a: 1}\n", {"c.yaml:2: train.steps needs a single value, not keys"}, {"steps: integer"});
  refuses("train:\n  steps:\n  seed: 1\n", {"c.yaml:2: train.steps has no value"}, {"steps: integer"});
  refuses("log:\n  dir: ~\n", {"c.yaml:2: log.dir has no value"}, {"dir: \"\""});
  refuses("device: {kind: cpu}\n", {"c.yaml:1: device needs a single value"}, {"auto | cpu | cuda"});
  refuses("train:\n# steps: 1\nlog: {every: 1}\n", {"c.yaml:1: section train has no keys"}, {"indent", "steps"});
  refuses("train:\n  steps: !!int \"4\"\n", {"c.yaml:2: train.steps carries the YAML tag"}, {"steps: integer"});
  refuses("train: 5\n", {"c.yaml:1: section train has no keys"}, {"indent"});
  refuses("train: [steps, 5]\n", {"c.yaml:1: section train has no keys"}, {"indent"});
}

TEST_CASE("integers are plain whole numbers") {
  refuses_value("parallel", "tensor", "\"4\"", "is a quoted string: \"4\"", "write 4");
  refuses_value("parallel", "tensor", "'4'", "is a quoted string", "write 4");
  refuses_value("parallel", "tensor", "\"four\"", "is a quoted string", "write a whole number");
  refuses_value("train", "steps", "1e6", "must be an integer, not 1e6", "write 1000000");
  refuses_value("train", "steps", "4.0", "must be an integer, not 4.0", "write 4");
  refuses_value("train", "steps", "4.5", "must be an integer, not 4.5", "whole number in full");
  refuses_value("train", "steps", "1_000", "must be an integer, not 1_000", "write 1000");
  refuses_value("train", "steps", "4K", "must be an integer, not 4K", "whole number in full");
  refuses_value("train", "steps", "0x10", "must be an integer, not 0x10", "whole number");
  refuses_value("train", "steps", "010", "is written with a leading zero", "octal");
  refuses_value("train", "steps", "many", "must be an integer, not many", "whole number");
  refuses_value("train", "steps", "true", "must be an integer, not true", "whole number");
  refuses_value("train", "steps", "9223372036854775808", "is out of range", "9223372036854775807");
  refuses_value("parallel", "tensor", "3000000000", "is out of range", "2147483647");
  refuses_value("train", "seed", "-1", "is out of range: -1", "use 0 to");
}

TEST_CASE("auto is a word, not a number") {
  refuses_value("parallel", "data", "0", "cannot be 0", "write auto");
  refuses_value("data", "eod_id", "-1", "cannot be -1", "write auto");
  refuses_value("parallel", "data", "automatic", "must be an integer, not automatic", "or auto");
  refuses_value("parallel", "tensor", "auto", "must be an integer, not auto", "whole number");
}

TEST_CASE("numbers are finite") {
  CHECK(load_text("optimizer: {lr: 1E-3}\n").optimizer.lr == 1e-3);
  CHECK(load_text("optimizer: {lr: 1.}\n").optimizer.lr == 1);
  for (const char* value : {"nan", ".nan", "inf", ".inf", "-.inf", "3e", "1,5", "1_0.5", "0x1p3", "+-1", "1e-3f"}) {
    refuses_value("optimizer", "lr", value, std::string("must be a finite number, not ") + value, "3e-4");
  }
  refuses_value("optimizer", "lr", "1e999", "is out of range: 1e999", "double");
  refuses_value("optimizer", "lr", "\"3e-4\"", "is a quoted string", "write 3e-4");
}

TEST_CASE("truth values are true and false") {
  CHECK_FALSE(load_text("parallel: {sequence: false}\n").parallel.sequence);
  for (const char* value : {"yes", "on", "True", "TRUE", "1", "y"}) {
    refuses_value("parallel", "sequence", value, std::string("must be true or false, not ") + value, "write true");
  }
  for (const char* value : {"no", "off", "False", "0", "n"}) {
    refuses_value("parallel", "sequence", value, std::string("must be true or false, not ") + value, "write false");
  }
  refuses_value("parallel", "sequence", "maybe", "must be true or false", "write true or false");
  refuses_value("parallel", "sequence", "\"true\"", "is a quoted string", "write true");
}

TEST_CASE("words are those of the list") {
  refuses_value("schedule", "kind", "cosin", "must be constant, cosine, linear or wsd, not cosin",
                "did you mean cosine?");
  refuses_value("numerics", "precision", "fp16", "must be fp32 or bf16, not fp16", "did you mean");
  refuses_value("data", "kind", "parquet", "must be mock, tokens or megatron", "use mock, tokens or megatron");
  refuses("device: gpu\n", {"c.yaml:1: device must be auto, cpu or cuda, not gpu"}, {"did you mean cpu?"});
}

TEST_CASE("arguments are judged like the file and named in the message") {
  CHECK(load_text(kSmall, {"device=cpu"}).device == DeviceChoice::kCpu);
  CHECK(load_text(kSmall, {"optimizer.lr=3e-4"}).optimizer.lr == 3e-4);
  CHECK(load_text(kSmall, {"data.path=a=b"}).data.path == "a=b");
  CHECK(load_text(kSmall, {"data.split=9, 1"}).data.split == "9, 1");
  CHECK(load_text(kSmall, {"log.dir=\"\""}).log.dir.empty());
  refuses_argument("train.steps", "not of the form section.key=value", "train.steps=100");
  refuses_argument("=5", "not of the form section.key=value", "train.steps=100");
  refuses_argument("train.stpes=5", "unknown key train.stpes", "did you mean train.steps?");
  refuses_argument("trian.steps=5", "unknown section trian", "did you mean train?");
  refuses_argument("steps=5", "steps is not a section", "train.steps");
  refuses_argument("train=5", "train is a section", "name a key of it: steps");
  refuses_argument("device.kind=cpu", "unknown key device.kind", "device is a single value");
  refuses_argument(".device=cpu", "not of the form section.key=value", "train.steps=100");
  refuses_argument("train.=5", "not of the form section.key=value", "train.steps=100");
  refuses_argument("train.steps=\"5\" 6", "train.steps: a second YAML document begins here", "keep one");
  refuses_argument("train.steps=", "train.steps has no value", "integer");
  refuses_argument("train.steps=\"5\"", "train.steps is a quoted string", "write 5");
  refuses_argument("train.steps=[5]", "train.steps needs a single value, not a list", "integer");
  refuses_argument("train.steps=[5", "train.steps: not valid YAML", "quote it");
  refuses_argument("train.steps=1e3", "train.steps must be an integer", "write 1000");
  refuses_argument("model.preset=qwen3-5b", "unknown model.preset qwen3-5b", "did you mean");
  require_error(ErrorKind::kConfig, {"argument train.steps=2: train.steps is given twice, first by train.steps=1"},
                {"keep one"}, [] {
                  load_text(kSmall, {"train.steps=1", "train.steps=2"});
                });
}
