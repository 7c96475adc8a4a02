#include "config/blend.h"

#include "support/errors.h"

using namespace invar;
using namespace invar::test;

using Paths = std::vector<std::string>;
using Weights = std::vector<double>;

TEST_CASE("a blend is pairs of weight and path, or paths alone") {
  const Blend pairs = parse_blend("0.7 data/a.bin 3e-1 data/b.bin");
  CHECK(pairs.paths == Paths{"data/a.bin", "data/b.bin"});
  CHECK(pairs.weights == Weights{0.7, 0.3});
  const Blend paths = parse_blend(" a\tb\n c  ");
  CHECK(paths.paths == Paths{"a", "b", "c"});
  CHECK(paths.weights.empty());
  CHECK(parse_blend("a b").weights.empty());
  CHECK(parse_blend("a").paths == Paths{"a"});
  CHECK(parse_blend("2 a").weights == Weights{2});
  CHECK(parse_blend("1 a 1 a").paths == Paths{"a", "a"});  // a source may come twice
  // Not numbers.
  CHECK(parse_blend("./1 2x 0x10 1e 1.2.3").paths == Paths{"./1", "2x", "0x10", "1e", "1.2.3"});
}

TEST_CASE("a blend that could be meant otherwise is refused") {
  const auto refused = [](const std::string& text, const std::string& why) {
    require_error(ErrorKind::kConfig, {why}, {"before every path"}, [&] { parse_blend(text); });
  };
  for (const char* text : {"", "  \t"}) refused(text, "there is no path");
  refused("0.5", "the last weight has no path");
  refused("0.5 a 0.5", "the last weight has no path");
  refused("a 0.5", "the last weight has no path");
  refused("0.5 0.5", "the weight 0.5 follows another weight");
  refused("0.5 a b", "some paths have no weight");
  refused("0.5 a b c", "some paths have no weight");
  refused("a 0.5 b", "some paths have no weight");
  for (const char* weight : {"0", "-0.5", "nan", "inf", "-inf", "1e-13", "1e13", "1e999", "1e-999"}) {
    refused(format("1 a {} b", weight), format("the weight {} is not within 1e-12 to 1", weight));
  }
}

TEST_CASE("a blend has at most 32766 sources") {
  const auto sources = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += "a ";
    return text;
  };
  CHECK(parse_blend(sources(32766)).paths.size() == 32766);
  require_error(ErrorKind::kConfig, {"32767 sources; 32766 are possible"}, [&] { parse_blend(sources(32767)); });
}

TEST_CASE("a blend has a text, unless blanks or numbers among its paths need a list") {
  const Blend plain = {{"data/a.bin", "b"}, {0.7, 1e-3}};
  CHECK(text_of(plain) == "0.7 data/a.bin 0.001 b");
  CHECK(parse_blend(text_of(plain)) == plain);
  CHECK(text_of({{"a", "b"}, {}}) == "a b");
  CHECK(text_of({{"my data", "b"}, {}}).empty());
  CHECK(text_of({{"my data"}, {2}}).empty());
  CHECK(text_of({{"1", "b"}, {0.5, 0.5}}).empty());
  CHECK(text_of({}).empty());
}
