#include "config/suggest.h"

#include <algorithm>

namespace invar {
namespace {

// Optimal string alignment distance, three rows of the table at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({replaced, previous[j] + 1, current[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

}  // namespace

std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known) {
  constexpr size_t kLongest = 100;  // of words worth a suggestion
  if (word.size() > kLongest) return {};
  size_t best = word.size() < 4 ? 2 : std::max<size_t>(2, word.size() / 3) + 1;
  std::string_view nearest;
  for (std::string_view candidate : known) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string join_words(std::span<const std::string_view> words, std::string_view last) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? last : ", ";
    text += words[i];
  }
  return text;
}

std::string join_numbers(std::span<const int> numbers, std::string_view last) {
  std::vector<std::string> texts;
  for (int number : numbers) texts.push_back(std::to_string(number));
  const std::vector<std::string_view> words(texts.begin(), texts.end());
  return join_words(words, last);
}

}  // namespace invar
