#include "core/json_object.h"

#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

namespace {

const JsonRules kRules{ErrorKind::kData, "copy it again", 1'000'000, "add it"};

JsonObject parse(const std::string& text) {
  return JsonObject::parse(text, "a.json", kRules);
}

void refuses(const std::string& text, const std::string& message) {
  INFO(text.substr(0, 100));
  require_error(ErrorKind::kData, {message}, [&] { parse(text); });
}

}  // namespace

TEST_CASE("The fields of a JSON object are read by their types") {
  const JsonObject json =
      parse(R"({"n": -3, "x": 2.5, "yes": true, "t": "é", "none": null, "ids": [1, 9223372036854775807],
      "texts": ["a", ""], "in": {"list": [{"id": 4}, {"id": 5}]}})");
  CHECK(json.integer("n") == -3);
  CHECK(json.number("x", 0) == 2.5);
  CHECK(json.number("n", 0) == -3);
  CHECK(json.boolean("yes", false));
  CHECK(json.text("t", "") == "é");
  CHECK(json.integers("ids") == std::vector<int64_t>{1, INT64_MAX});
  CHECK(json.texts("texts") == std::vector<std::string>{"a", ""});
  const std::vector<JsonObject> list = json.object("in").objects("list");
  REQUIRE(list.size() == 2);
  CHECK(list[1].integer("id") == 5);
  CHECK(list[1].names() == std::vector<std::string>{"id"});
  CHECK(list[1].full_name("id") == "in.list[1].id");
  CHECK(json.names() == std::vector<std::string>{"n", "x", "yes", "t", "none", "ids", "texts", "in"});
  CHECK(json.integer("absent", 7) == 7);
  CHECK(json.integer("none", 7) == 7);
  CHECK(json.integers("none").empty());
  CHECK((json.is_null("none") && !json.has("none") && !json.is_null("absent")));
  CHECK((json.is_number("x") && json.is_text("t") && json.is_list("ids") && json.is_object("in")));
  CHECK_FALSE((json.is_number("t") || json.is_text("x") || json.is_list("in") || json.is_object("absent")));
}

TEST_CASE("A JSON field of another type is refused with its full name") {
  const JsonObject json =
      parse(R"({"in": {"n": 2.5, "large": 18446744073709551615, "t": "a\u001b\n", "list": [1, "b"]}})");
  const JsonObject in = json.object("in");
  const auto refused = [](const std::string& message, const std::function<void()>& action) {
    require_error(ErrorKind::kData, {"a.json: " + message}, {"copy it again"}, action);
  };
  refused("in.n must be an integer, not 2.5", [&] { in.integer("n"); });
  refused("in.large must be an integer below 2^63, not 18446744073709551615", [&] { in.integer("large"); });
  refused(R"(in.t must be a number, not "a\u001b\n")", [&] { in.number("t", 0); });
  refused("in.n must be true or false", [&] { in.boolean("n", false); });
  refused("in.n must be a string", [&] { in.text("n", ""); });
  refused("in.list must be a list of integers", [&] { in.integers("list"); });
  refused("in.list must be a list of strings", [&] { in.texts("list"); });
  refused("in.list must be a list of objects", [&] { in.objects("list"); });
  refused("in.n must be an object", [&] { in.object("n"); });
  refused("absent must be an object, not absent", [&] { json.object("absent"); });
  require_error(ErrorKind::kData, {"a.json: missing in.a, in.b"}, {"add it"}, [&] { in.require({"a", "n", "b"}); });
}

TEST_CASE("JSON of millions of values is refused before they fill the memory") {
  const auto list = [](int64_t items) {
    std::string text = "{\"a\":[0";
    for (int64_t i = 1; i < items; ++i) text += ",0";
    return text + "]}";
  };
  refuses(list(4'000'000), "a.json: more than 4000000 values");  // with the list and the object
  CHECK(parse(list(3'999'998)).is_list("a"));
}

TEST_CASE("JSON of a hundred thousand levels is refused, not followed") {
  for (const std::string part : {"[", "{\"a\":"}) {
    std::string text = "{\"config\":";
    for (int i = 0; i < 100'000; ++i) text += part;
    refuses(text, "a.json: more than 64 levels deep");
  }
  std::string most = "1";
  for (int i = 0; i < 63; ++i) most = "[" + most + "]";
  CHECK(parse("{\"a\":" + most + "}").is_list("a"));
  refuses("{\"a\":[" + most + "]}", "more than 64 levels deep");
}

TEST_CASE("A JSON number that no double holds is refused by field") {
  refuses(R"({"rope": {"theta": 1e400}})", "a.json: rope.theta must be a number that a double holds, not 1e400");
  refuses(R"({"list": [{"x": 0}, {"x": [1, -1e999]}]})", "list[1].x[1] must be a number");
  refuses("{\"a\": " + std::string(10'000, '9') + "}", "... (10000 bytes)");
  CHECK(parse(R"({"a": 1e308})").number("a", 0) == 1e308);
}

TEST_CASE("A JSON key given twice is refused at every level") {
  refuses(R"({"a": 1, "b": 2, "a": 1})", "a.json: a is given twice");
  refuses(R"({"list": [{"a": 1}, {"b": {"c": 1, "d": [], "c": 2}}]})", "a.json: list[1].b.c is given twice");
  refuses("{\"\\u001b[2J\": 1, \"\\u001b[2J\": 1}", R"(a.json: \x1b[2J is given twice)");
  CHECK(parse(R"({"a": {"b": 1}, "b": {"b": 1}, "list": [{"b": 1}, {"b": 2}]})").has("list"));
}

TEST_CASE("A JSON file that is none is refused with its line") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& text, const std::string& message) {
    const std::string path = folder.write("a.json", text);
    require_error(ErrorKind::kData, {path + message}, {"copy it again"}, [&] { JsonObject::open(path, kRules); });
  };
  refused("{\n\"a\": 1,\n\"b\": oops}", ":3: not valid JSON");
  refused("{\n\"a\":\n\n1e400}", ":4: a must be a number");
  refused("", ":1: not valid JSON");
  refused("{} {}", ":1: not valid JSON");
  refused("{\"a\": NaN}", ":1: not valid JSON");
  refused("{\"a\": \"\xff\"}", ":1: not valid JSON");
  refused("[]", ": not a JSON object");
  refused(std::string(1'000'001, ' '), ": 1000001 bytes, where at most 1000000 are expected");
  require_error(ErrorKind::kData, {"none.json: cannot be opened: No such file"}, {"copy it again"},
                [&] { JsonObject::open((folder / "none.json").string(), kRules); });
}
