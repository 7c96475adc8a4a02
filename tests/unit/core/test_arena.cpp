#include "device/arena.h"

#include "support/errors.h"

using namespace invar;
using test::require_error;

TEST_CASE("an arena cuts aligned tensors and takes them back in reverse") {
  Arena arena("scratch", DeviceType::kCpu, 4096);
  const Tensor a = arena.allocate("a", DType::kF32, {3});
  CHECK(reinterpret_cast<uintptr_t>(a.raw()) % Arena::kAlignment == 0);
  CHECK(a.span<float>()[2] == 0.0f);
  void* again = nullptr;
  {
    const ArenaScope scope(arena);
    again = arena.allocate("b", DType::kBF16, {100}).raw();
    CHECK(arena.used() == 512);
  }
  CHECK(arena.used() == 256);
  CHECK(arena.high_water() == 512);
  CHECK(arena.allocate("c", DType::kI32, {5}).raw() == again);
}

TEST_CASE("a full arena says what did not fit") {
  Arena arena("scratch", DeviceType::kCpu, 1024);
  require_error(ErrorKind::kFault, {"arena 'scratch' of 1024 bytes is full: 0 used, 'logits' wants 4096"},
                [&] { arena.allocate("logits", DType::kF32, {1000}); });
  CHECK_THROWS_AS(arena.release(1), Error);
}

TEST_CASE("on meta an arena has no bytes and no limit") {
  Arena arena("parameters", DeviceType::kMeta, 0);
  const Tensor t = arena.allocate("w", DType::kF32, {int64_t{1} << 30, 1024});
  CHECK(t.is_meta());
  CHECK(t.raw() == nullptr);
  CHECK(arena.high_water() == int64_t{4} << 40);
}

TEST_CASE("more than can be addressed is refused, also on meta") {
  Arena arena("saved", DeviceType::kMeta, 0);
  constexpr int64_t kLargest = int64_t{1} << 54;  // f32: 2^56 bytes, the most that an arena may have
  arena.allocate("x", DType::kF32, {kLargest});
  require_error(ErrorKind::kConfig, {"arena 'saved': 'y' of f32 (18014398509481984)", "too large to address"},
                {"sizes of the model or of the batch"}, [&] { arena.allocate("y", DType::kF32, {kLargest}); });
  CHECK(arena.used() == int64_t{1} << 56);
  // The rounding up to the alignment.
  arena.release(0);
  require_error(ErrorKind::kConfig, {"'z'", "too large to address"},
                [&] { arena.allocate("z", DType::kBF16, {std::numeric_limits<int64_t>::max() / 2}); });
  CHECK(arena.used() == 0);
}
