#include "checkpoint/checksum.h"

#include <zlib.h>

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace invar {
namespace {

uint32_t plain_crc32(std::span<const std::byte> bytes, uint32_t crc) {
  return static_cast<uint32_t>(::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

#if defined(__x86_64__)

// The sum is the remainder of the message, a polynomial over GF(2), by P. So 64 bytes may be replaced by their product
// with x^512 mod P, added to the 64 bytes that follow, and so on to the last 64. That takes one carry-less product for
// 8 bytes. P and all remainders have their bits in reverse order, as in zlib.
constexpr uint32_t kPolynomial = 0xedb88320;

// x^n mod P, as the second factor of a carry-less product in reverse order, which lacks one place.
constexpr long long power_of_x(int n) {
  uint32_t power = 0x80000000;  // x^0
  for (int i = 0; i < n; ++i) power = (power >> 1) ^ ((power & 1) != 0 ? kPolynomial : 0);
  return static_cast<long long>(uint64_t{power} << 1);
}

// The quotient of x^64 by P, in reverse order: with it a product gives the quotient of any 32 bits by P.
constexpr long long quotient_of_x64() {
  uint64_t quotient = 0;
  uint32_t rest = 0x80000000;  // x^0
  for (int i = 1; i <= 64; ++i) {
    if (i >= 32) quotient = (quotient >> 1) | (uint64_t{rest & 1} << 32);
    rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
  }
  return static_cast<long long>(quotient);
}

constexpr size_t kLanes = 4;
constexpr size_t kLane = 16;  // bytes
constexpr size_t kFoldedAtOnce = kLanes * kLane;

// `lane` moved on by Bits, plus `next`.
template <int Bits>
__attribute__((target("pclmul"))) __m128i fold(__m128i lane, __m128i next) {
  const __m128i powers = _mm_set_epi64x(power_of_x(Bits - 32), power_of_x(Bits + 32));
  const __m128i low = _mm_clmulepi64_si128(lane, powers, 0x00);
  const __m128i high = _mm_clmulepi64_si128(lane, powers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Of 16 bytes times x^32 by P: 64 bits are folded away, then 32, and of the rest the multiple of P is taken off.
__attribute__((target("pclmul"))) uint32_t remainder(__m128i lane) {
  const __m128i low_word = _mm_set_epi32(0, 0, 0, -1);
  const __m128i powers = _mm_set_epi64x(power_of_x(64), power_of_x(96));
  const __m128i divisors = _mm_set_epi64x(static_cast<long long>(uint64_t{kPolynomial} << 1 | 1), quotient_of_x64());
  lane = _mm_xor_si128(_mm_clmulepi64_si128(lane, powers, 0x00), _mm_srli_si128(lane, 8));
  lane = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(lane, low_word), powers, 0x10), _mm_srli_si128(lane, 4));
  const __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(lane, low_word), divisors, 0x00);
  const __m128i multiple = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_word), divisors, 0x10);
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_srli_si128(_mm_xor_si128(lane, multiple), 4)));
}

__attribute__((target("pclmul"))) uint32_t folding_crc32(std::span<const std::byte> bytes, uint32_t crc) {
  const auto load = [&](size_t at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data() + at)); };
  __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m128i b = load(kLane), c = load(2 * kLane), d = load(3 * kLane);
  size_t at = kFoldedAtOnce;
  for (; bytes.size() - at >= kFoldedAtOnce; at += kFoldedAtOnce) {
    a = fold<512>(a, load(at));
    b = fold<512>(b, load(at + kLane));
    c = fold<512>(c, load(at + 2 * kLane));
    d = fold<512>(d, load(at + 3 * kLane));
  }
  const uint32_t sum = ~remainder(fold<128>(fold<128>(fold<128>(a, b), c), d));
  return at == bytes.size() ? sum : plain_crc32(bytes.subspan(at), sum);
}

#endif

}  // namespace

uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul");
  if (folds && bytes.size() >= kFoldedAtOnce) return folding_crc32(bytes, crc);
#endif
  return plain_crc32(bytes, crc);
}

uint32_t crc32_of(const InputFile& file, Range bytes, uint32_t crc) {
  constexpr int64_t kBlock = 1 << 18;  // stays in the cache between reading and summing
  std::vector<std::byte> block(static_cast<size_t>(std::min(kBlock, bytes.size())));
  for (int64_t at = bytes.begin; at < bytes.end; at += kBlock) {
    const auto part = std::span(block).first(static_cast<size_t>(std::min(kBlock, bytes.end - at)));
    file.read_at(at, part);
    crc = crc32(part, crc);
  }
  return crc;
}

}  // namespace invar
