#include "device/arena.h"

#include "support/catch.h"

using namespace invar;

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
  CHECK_THROWS_WITH(arena.allocate("logits", DType::kF32, {1000}),
                    Catch::Contains("scratch") && Catch::Contains("logits"));
  CHECK_THROWS_AS(arena.release(1), Error);
}

TEST_CASE("on meta an arena has no bytes and no limit") {
  Arena arena("parameters", DeviceType::kMeta, 0);
  const Tensor t = arena.allocate("w", DType::kF32, {int64_t{1} << 30, 1024});
  CHECK(t.is_meta());
  CHECK(t.raw() == nullptr);
  CHECK(arena.high_water() == int64_t{4} << 40);
}
