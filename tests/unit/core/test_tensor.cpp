#include "core/tensor.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "support/errors.h"

using namespace invar;
using test::require_error;

TEST_CASE("bf16 rounds to nearest even and keeps NaN and infinity") {
  CHECK(BF16(1.0f).bits == 0x3f80);
  CHECK(BF16(std::bit_cast<float>(0x3f808000u)).bits == 0x3f80);  // a tie goes to even
  CHECK(BF16(std::bit_cast<float>(0x3f818000u)).bits == 0x3f82);
  CHECK(BF16(std::bit_cast<float>(0x3f808001u)).bits == 0x3f81);
  CHECK(std::isnan(static_cast<float>(BF16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isinf(static_cast<float>(BF16(std::numeric_limits<float>::infinity()))));
  CHECK(std::isinf(static_cast<float>(BF16(std::numeric_limits<float>::max()))));
  CHECK(BF16(-0.0f).bits == 0x8000);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    BF16 x;
    x.bits = static_cast<uint16_t>(bits);
    const auto value = static_cast<float>(x);
    if (!std::isnan(value)) CHECK(BF16(value).bits == x.bits);
  }
}

TEST_CASE("tensor views") {
  std::vector<float> data(24);
  for (size_t i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  const Tensor t(data.data(), DType::kF32, DeviceType::kCpu, {4, 3, 2});
  CHECK(t.numel() == 24);
  CHECK(t.bytes() == 96);
  CHECK(t.dim(-1) == 2);
  CHECK(t.describe() == "f32 (4, 3, 2)");
  const Tensor rows = t.rows(1, 3);
  CHECK(rows.dim(0) == 2);
  CHECK(rows.data<float>()[0] == 6.0f);
  CHECK(t.view({24}).rows(23, 24).data<float>()[0] == 23.0f);
  CHECK(t.rows(4, 4).empty());
  CHECK_THROWS_AS(t.view({5, 5}), Error);
  CHECK_THROWS_AS(t.rows(3, 5), Error);
  CHECK_THROWS_AS(t.rows(-1, 2), Error);
  CHECK_THROWS_AS(t.data<BF16>(), Error);
  CHECK_THROWS_AS(Tensor(nullptr, DType::kF32, DeviceType::kCpu, {-1}), Error);
}

TEST_CASE("a shape whose bytes cannot be counted is refused") {
  const auto make = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor(nullptr, dtype, DeviceType::kMeta, shape);
  };
  constexpr int64_t kGiga = int64_t{1} << 30;
  CHECK(make(DType::kF32, {kGiga, kGiga}).bytes() == int64_t{1} << 62);
  CHECK(make(DType::kF32, {2 * kGiga, kGiga - 1}).numel() == 2 * kGiga * (kGiga - 1));
  CHECK(make(DType::kF32, {kGiga, kGiga, kGiga, 0}).rows(1, 2).numel() == 0);
  const auto refused = [&](DType dtype, std::initializer_list<int64_t> shape, const std::string& text) {
    require_error(ErrorKind::kConfig, {"a tensor of shape " + text + " is too large to address"},
                  {"sizes of the model or of the batch"}, [&] { make(dtype, shape); });
  };
  refused(DType::kF32, {2 * kGiga, kGiga}, "(2147483648, 1073741824) in f32");  // 2^61 elements, 2^63 bytes
  refused(DType::kBF16, {4, kGiga, kGiga}, "(4, 1073741824, 1073741824) in bf16");
  refused(DType::kF32, {kGiga, kGiga, kGiga, 8}, "(1073741824, 1073741824, 1073741824, 8) in f32");
  refused(DType::kF32, {0, kGiga, 2 * kGiga}, "(0, 1073741824, 2147483648) in f32");  // the stride of dim 0
}

TEST_CASE("an error tells kind, place and hint") {
  const Error error(ErrorKind::kData, "tokens.bin: token 300 at 7", "raise model.vocab_size");
  CHECK(error.kind() == ErrorKind::kData);
  CHECK(error.location().starts_with("tests/unit/core/test_tensor.cpp:"));
  const Error outer = error.in("step 3");
  CHECK(std::string(outer.what()) == "step 3: tokens.bin: token 300 at 7");
  CHECK(outer.hint() == error.hint());
  CHECK(outer.location() == error.location());
  try {
    INVAR_CHECK(1 == 2, "{} apples", 3);
    FAIL("did not throw");
  } catch (const Error& check) {
    CHECK(check.kind() == ErrorKind::kFault);
    CHECK(std::string(check.what()) == "check failed: 1 == 2: 3 apples");
  }
}
