#include "core/shown.h"

#include "support/catch.h"

using invar::shown;

TEST_CASE("text of a file is shown on one line, without control characters") {
  CHECK(shown("model.layers.0") == "model.layers.0");
  CHECK(shown("") == "");
  CHECK(shown("grüße · ∞ 😀") == "grüße · ∞ 😀");
  CHECK(shown("a\nb\r\tc") == "a\\nb\\r\\tc");
  CHECK(shown(std::string_view("\0\x1b[2J\x7f", 6)) == "\\x00\\x1b[2J\\x7f");
}

TEST_CASE("bytes that are no UTF-8 are shown as numbers") {
  CHECK(shown("\xff") == "\\xff");
  CHECK(shown("\xc3") == "\\xc3");                    // cut off
  CHECK(shown("\xc2\x85") == "\\xc2\\x85");           // a control character
  CHECK(shown("\xc0\xaf") == "\\xc0\\xaf");           // overlong
  CHECK(shown("\xed\xa0\x80") == "\\xed\\xa0\\x80");  // half of a pair of UTF-16
  CHECK(shown("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");
}

TEST_CASE("long text is cut, and its length is said") {
  CHECK(shown(std::string(80, 'x')) == std::string(80, 'x'));
  CHECK(shown(std::string(81, 'x')) == std::string(80, 'x') + "... (81 bytes)");
  CHECK(shown("abcdef", 3) == "abc... (6 bytes)");
}
