#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace invar {

// The word closest to a misspelt one, or empty if none is close. Distance counts insertions, deletions,
// replacements and swaps of neighbours; close is at most a third of the length, and at least 2 for words of 4 or more.
std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known);

// "a", "a or b", "a, b or c"
std::string join_words(std::span<const std::string_view> words, std::string_view last = " or ");
std::string join_numbers(std::span<const int> numbers, std::string_view last = " or ");

}  // namespace invar
