#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/input_file.h"
#include "core/range.h"

namespace invar {

// Numbers that are read by their index from where they lie: in memory, or in a file, where they need not be aligned.
// Copies share them. Of a file nothing is kept in memory.
template <class T>
class StoredArray {
 public:
  StoredArray() = default;
  explicit StoredArray(std::vector<T> values)
      : values_(std::make_shared<const std::vector<T>>(std::move(values))), size_(std::ssize(*values_)) {}
  // `size` numbers from byte `first_byte` of the file on, all of them inside it.
  StoredArray(std::shared_ptr<const InputFile> file, int64_t first_byte, int64_t size)
      : file_(std::move(file)), first_byte_(first_byte), size_(size) {}

  int64_t size() const { return size_; }

  // Fills `out` with the numbers from index `first` on. Error{kData} if the file cannot be read any more.
  void read(int64_t first, std::span<T> out) const {
    INVAR_CHECK(first >= 0 && std::ssize(out) <= size_ - first, "numbers {} + {} of {}", first, out.size(), size_);
    const int64_t offset = first_byte_ + first * static_cast<int64_t>(sizeof(T));
    if (file_ != nullptr) {
      file_->read_at(offset, out);
    } else if (!out.empty()) {
      std::memcpy(out.data(), reinterpret_cast<const std::byte*>(values_->data()) + offset, out.size_bytes());
    }
  }
  T operator[](int64_t index) const {
    T value;
    read(index, std::span(&value, 1));
    return value;
  }
  std::vector<T> all() const {
    std::vector<T> values(static_cast<size_t>(size_));
    read(0, values);
    return values;
  }

  StoredArray part(Range range) const {
    INVAR_CHECK(range.begin >= 0 && range.end <= size_, "numbers [{}, {}) of {}", range.begin, range.end, size_);
    StoredArray part = *this;
    part.first_byte_ += range.begin * static_cast<int64_t>(sizeof(T));
    part.size_ = range.size();
    return part;
  }

 private:
  std::shared_ptr<const std::vector<T>> values_;  // or
  std::shared_ptr<const InputFile> file_;
  int64_t first_byte_ = 0;
  int64_t size_ = 0;
};

// Calls visit(first index, numbers) for one block after another, with little memory.
template <class T, class Visit>
void visit_blocks(const StoredArray<T>& array, Visit visit) {
  constexpr int64_t kBlock = 1 << 16;
  std::vector<T> block(static_cast<size_t>(std::min(array.size(), kBlock)));
  for (int64_t first = 0; first < array.size(); first += kBlock) {
    const auto numbers = std::span(block).first(static_cast<size_t>(std::min(kBlock, array.size() - first)));
    array.read(first, numbers);
    visit(first, std::span<const T>(numbers));
  }
}

}  // namespace invar
