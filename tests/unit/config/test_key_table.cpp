#include "config/key_table.h"

#include <set>

#include "load_text.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

namespace {

struct Anything {
  template <typename T>
  operator T() const;
};

// How many members an aggregate has: the most initialisers that it takes.
template <typename T, typename... Args>
constexpr size_t member_count() {
  if constexpr (requires { T{Args{}..., Anything{}}; }) {
    return member_count<T, Args..., Anything>();
  } else {
    return sizeof...(Args);
  }
}

// Another value than the present one, of the same type.
void change(const Field& field) {
  std::visit(
      [](auto* member) {
        using T = std::remove_pointer_t<decltype(member)>;
        if constexpr (std::is_same_v<T, std::string>) {
          *member = "a \"b\": #c\\\n\t\x01é";
        } else if constexpr (std::is_same_v<T, bool>) {
          *member = !*member;
        } else if constexpr (std::is_same_v<T, double>) {
          *member = *member / 3 + 1e-11;
        } else if constexpr (std::is_same_v<T, Blend>) {
          *member = {{"a, [b]: \"c\"", "1e5", " é"}, {0.1, 1e-11, 3}};
        } else if constexpr (std::is_same_v<T, IntegerLists>) {
          *member = {{"0,0,0", {}}, {"a: b", {3, -1}}};
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          *member = {"dp0.tp1", "1e5", "a, [b]: \"c\"", ""};
        } else if constexpr (std::is_same_v<T, std::vector<int>> || std::is_same_v<T, std::vector<double>>) {
          *member = {8, 7};
        } else if constexpr (std::is_enum_v<T>) {
          *member = *member == T{} ? static_cast<T>(1) : T{};
        } else {
          *member += 7;
        }
      },
      field);
}

Config without_origin(Config config) {
  config.origin.clear();
  return config;
}

}  // namespace

TEST_CASE("every member of the config has a key") {
  STATIC_REQUIRE(member_count<ParallelConfig>() == 8);
  CHECK(key_names("model").size() == member_count<ModelConfig>());
  CHECK(key_names("parallel").size() + 1 == member_count<ParallelConfig>());  // 1: nonuniform
  CHECK(key_names("parallel.nonuniform").size() == member_count<NonuniformConfig>());
  CHECK(key_names("numerics").size() == member_count<NumericsConfig>());
  CHECK(key_names("train").size() == member_count<TrainConfig>());
  CHECK(key_names("optimizer").size() == member_count<OptimizerConfig>());
  CHECK(key_names("schedule").size() == member_count<ScheduleConfig>());
  CHECK(key_names("data").size() == member_count<DataConfig>());
  CHECK(key_names("checkpoint").size() == member_count<CheckpointConfig>());
  CHECK(key_names("log").size() == member_count<LogConfig>());
  // Beside them origin is a member, and parallel.nonuniform is none.
  CHECK(section_names().size() + key_names("").size() == member_count<Config>());
}

TEST_CASE("every key has its own name, member and help") {
  std::set<std::string> names;
  std::set<std::string> changed;
  for (const Key& key : key_table()) {
    INFO(key.full_name());
    CHECK(names.insert(key.full_name()).second);
    CHECK(find_key(key.full_name()) == &key);
    CHECK_FALSE(key.help.empty());
    CHECK(key.help.find('|') == std::string_view::npos);
    Config config;
    CHECK(has_default(key, config));
    change(key.field(config));
    CHECK_FALSE(has_default(key, config));
    CHECK(changed.insert(to_yaml(config)).second);
  }
  CHECK(find_key("train.nothing") == nullptr);
  CHECK(find_key("") == nullptr);
  CHECK(find_key(".device") == nullptr);
}

TEST_CASE("the printed config is read back to an equal config") {
  CHECK(without_origin(load_text(to_yaml(Config{}))) == Config{});

  Config config;
  for (const Key& key : key_table()) {
    if (key.name != "preset" && key.name != "hf_path") change(key.field(config));
  }
  CHECK_FALSE(config == Config{});
  CHECK(without_origin(load_text(to_yaml(config))) == config);

  const Config preset = load_text("model: {preset: qwen3-8b, num_hidden_layers: 2}\noptimizer: {lr: 0.1}\n");
  CHECK(without_origin(load_text(to_yaml(preset))) == without_origin(preset));
}

TEST_CASE("strings that look like something else survive the round trip") {
  for (const std::string text :
       {"null", "~",  "true", "12",   "-",   "---",  "- a",  "[a]", "{a: b}", "*a", "&a",          "!a",
        "%a",   "@a", "a: b", "a #b", " a ", "a\nb", "a\\b", "'a'", "é",      "",   "/data/x.bin", "..."}) {
    INFO(text);
    Config config;
    config.data.path = text;
    CHECK(load_text(to_yaml(config)).data.path == text);
  }
}

TEST_CASE("numbers survive the round trip to the bit") {
  for (const double value : {0.1, 1.0 / 3.0, 1e-300, 5e-324, 1.7976931348623157e308, 123456789.123456789, 1e22}) {
    Config config;
    config.optimizer.lr = value;
    CHECK(load_text(to_yaml(config)).optimizer.lr == value);
  }
}

TEST_CASE("the printed config is plain to read") {
  const std::string text = to_yaml(load_text("model: {preset: qwen3-0.6b}\n"));
  CHECK(contains(text, "model:\n  family: qwen3\n  preset: qwen3-0.6b\n  hf_path: \"\"\n  init: random\n"));
  CHECK(contains(text, "  data: auto\n"));
  CHECK(contains(text, "\ndevice: auto\ntrain:\n"));
  CHECK(contains(text, "  lr: 0.0003\n"));
  CHECK(contains(text, "  tie_word_embeddings: true\n"));
}

TEST_CASE("the table of keys names every key with type, default and meaning") {
  const std::string text = describe_keys();
  for (const Key& key : key_table()) {
    CHECK(contains(text, "| `" + std::string(key.name) + "` |"));
    CHECK(contains(text, std::string(key.help)));
  }
  CHECK(
      contains(text, "**train**\n\n| key | type | default | meaning |\n|---|---|---|---|\n| `steps` | integer | – |"));
  CHECK(contains(text, "| `precision` | fp32 \\| bf16 | `bf16` |"));
  CHECK(contains(text, "| `data` | integer or auto | `auto` |"));
  CHECK(contains(text, "**top level**"));
}
