#pragma once

#include <cstdint>
#include <vector>

namespace invar {

// Document lengths of Megatron's MockGPTDataset: numpy.random.default_rng(0).integers(1, 4096, count, int32).
// PCG64 seeded through SeedSequence(0), 32-bit draws from the low half first, bounded by Lemire's method.
class MockGptLengths {
 public:
  MockGptLengths() {
    const auto words = seed_words();
    const auto word = [&](int i) { return uint64_t{words[2 * i + 1]} << 32 | words[2 * i]; };
    increment_ = ((Wide{word(2)} << 64 | word(3)) << 1) | 1u;
    step();
    state_ += Wide{word(0)} << 64 | word(1);
    step();
  }

  std::vector<int32_t> operator()(size_t count) {
    std::vector<int32_t> lengths(count);
    for (int32_t& length : lengths) length = 1 + static_cast<int32_t>(below(4095));
    return lengths;
  }

 private:
  using Wide = unsigned __int128;

  // SeedSequence(0).generate_state(4, uint64), as eight 32-bit words.
  static std::vector<uint32_t> seed_words() {
    uint32_t constant = 0x43b0d7e5u;
    const auto hash = [&](uint32_t value) {
      value ^= constant;
      constant *= 0x931e8875u;
      value *= constant;
      return value ^ (value >> 16);
    };
    std::vector<uint32_t> pool(4);
    for (uint32_t& value : pool) value = hash(0);
    for (size_t from = 0; from < 4; ++from) {
      for (size_t to = 0; to < 4; ++to) {
        if (from == to) continue;
        const uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * hash(pool[from]);
        pool[to] = mixed ^ (mixed >> 16);
      }
    }
    std::vector<uint32_t> words(8);
    constant = 0x8b51f9ddu;
    for (size_t i = 0; i < words.size(); ++i) {
      uint32_t value = pool[i % 4] ^ constant;
      constant *= 0x58f38dedu;
      value *= constant;
      words[i] = value ^ (value >> 16);
    }
    return words;
  }

  void step() { state_ = state_ * (Wide{2549297995355413924u} << 64 | Wide{4865540595714422341u}) + increment_; }

  uint32_t next32() {
    if (has_half_) {
      has_half_ = false;
      return half_;
    }
    step();
    const auto folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    const auto turn = static_cast<unsigned>(state_ >> 122);
    const uint64_t value = folded >> turn | folded << ((64 - turn) & 63);
    has_half_ = true;
    half_ = static_cast<uint32_t>(value >> 32);
    return static_cast<uint32_t>(value);
  }

  uint32_t below(uint32_t bound) {
    uint64_t product = uint64_t{next32()} * bound;
    while (static_cast<uint32_t>(product) < (0u - bound) % bound) product = uint64_t{next32()} * bound;
    return static_cast<uint32_t>(product >> 32);
  }

  Wide state_ = 0;
  Wide increment_ = 0;
  bool has_half_ = false;
  uint32_t half_ = 0;
};

}  // namespace invar
