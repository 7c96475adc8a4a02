#include "config/split.h"

#include "core/shown.h"
#include "support/errors.h"

using namespace invar;
using namespace invar::test;

using Weights = std::array<double, 3>;

TEST_CASE("a split string is read as Megatron reads it") {
  CHECK(parse_split("969, 30, 1") == Weights{969, 30, 1});
  CHECK(parse_split("90 10") == Weights{90, 10, 0});
  CHECK(parse_split("90,10") == Weights{90, 10, 0});
  CHECK(parse_split("1") == Weights{1, 0, 0});
  CHECK(parse_split(".5 0.5 2.") == Weights{0.5, 0.5, 2});
  CHECK(parse_split(" 1,,2, ") == Weights{1, 2, 0});
  CHECK(parse_split("0,0,007") == Weights{0, 0, 7});
  CHECK(parse_split("1000000000000") == Weights{1e12, 0, 0});
}

TEST_CASE("what Megatron would read around is refused") {
  const auto refused = [](const std::string& text, const std::string& why) {
    require_error(ErrorKind::kConfig, {"data.split = \"" + shown(text) + "\": " + why}, {"969, 30, 1"},
                  [&] { parse_split(text); });
  };
  for (const char* text : {"9e1,10", "-1,2", "1;2", "1/2", "nan", "a, b", "1\t2", "90%"}) refused(text, "only numbers");
  refused("1, 2, 3, 4", "there are more than three weights");
  refused("1.2.3", "1.2.3 is not a number");
  refused(".", ". is not a number");
  refused("1,..", ".. is not a number");
  refused("1000000000001", "1000000000001 exceeds 1");
  refused(std::string(400, '9'), std::string(80, '9') + "... (400 bytes) is not a number");  // beyond fp64
  for (const char* text : {"", " , ", "0,0", "0.0"}) refused(text, "the weights must have a positive sum");
}
