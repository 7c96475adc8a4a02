#include "parallel/mappings.h"

#include "comm/thread_communicator.h"
#include "support/rank_checks.h"

using namespace invar;

namespace {

constexpr int64_t kCols = 3;

float element(int64_t row, int64_t col) {
  return static_cast<float>(row * 10 + col);
}

}  // namespace

TEST_CASE("token slices are contiguous and complete; whole blocks where T does not divide") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_thread_ranks(ranks, [&](Communicator& world) {
      TensorRegion region(world, true);
      for (const int64_t tokens : {8, 12, 32, 33, 40, 100}) {
        region.set_tokens(tokens);
        const Range mine = region.local_tokens();
        if (tokens % ranks == 0) {
          CHECK(mine.size() == tokens / ranks);
        } else {
          CHECK((mine.begin % TensorRegion::kTokenBlock == 0 || mine.begin == tokens));
        }
        const int64_t sum = all_reduce_value(world, mine.size(), ReduceOp::kSum);
        CHECK(sum == tokens);
      }
    });
  }
}

TEST_CASE("gather and reduce cross the border with and without sequence parallelism") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool sequence : {false, true}) {
      for (const int64_t tokens : {12, 20}) {
        run_thread_ranks(ranks, [&](Communicator& world) {
          TensorRegion region(world, sequence);
          region.set_tokens(tokens);
          const Stream stream(DeviceType::kCpu);
          Arena scratch("scratch", DeviceType::kCpu, 1 << 16);
          const Range mine = region.local_tokens();
          const Tensor local = scratch.allocate("local", DType::kF32, {mine.size(), kCols});
          for (int64_t i = 0; i < local.numel(); ++i)
            local.data<float>()[i] = element(mine.begin + i / kCols, i % kCols);
          const Tensor all = region.gather(stream, scratch, local);
          REQUIRE(all.dim(0) == tokens);
          for (int64_t i = 0; i < all.numel(); ++i) CHECK(all.data<float>()[i] == element(i / kCols, i % kCols));

          const Tensor partial = scratch.allocate("partial", DType::kF32, {tokens, kCols});
          for (int64_t i = 0; i < partial.numel(); ++i) {
            partial.data<float>()[i] = element(i / kCols, i % kCols) * static_cast<float>(world.rank() + 1);
          }
          const Tensor sum = region.reduce(stream, scratch, partial, DType::kBF16);
          REQUIRE(sum.dim(0) == mine.size());
          REQUIRE(sum.dtype() == DType::kBF16);
          const auto terms = static_cast<float>(ranks * (ranks + 1) / 2);
          for (int64_t i = 0; i < sum.numel(); ++i) {
            const float want = element(mine.begin + i / kCols, i % kCols) * terms;
            CHECK(static_cast<float>(sum.data<BF16>()[i]) == static_cast<float>(BF16(want)));
          }
        });
      }
    }
  }
}

TEST_CASE("terms are exchanged in the region's reduce_dtype; in bf16 the sum is a part of them") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool sequence : {false, true}) {
      run_thread_ranks(ranks, [&](Communicator& world) {
        constexpr int64_t kTokens = 20;
        TensorRegion region(world, sequence, 0, DType::kBF16);
        region.set_tokens(kTokens);
        CHECK(region.partial_dtype(DType::kBF16) == DType::kBF16);
        CHECK(TensorRegion(world, sequence).partial_dtype(DType::kBF16) == (ranks == 1 ? DType::kBF16 : DType::kF32));
        const Stream stream(DeviceType::kCpu);
        Arena scratch("scratch", DeviceType::kCpu, 1 << 16);
        const Tensor partial = scratch.allocate("partial", DType::kBF16, {kTokens, kCols});
        const auto whole = [](int64_t i) { return static_cast<float>(i % 23); };  // sums are exact
        for (int64_t i = 0; i < partial.numel(); ++i) {
          partial.data<BF16>()[i] = BF16(whole(i) * static_cast<float>(world.rank() + 1));
        }
        const Tensor sum = region.reduce(stream, scratch, partial, DType::kBF16);
        const Range mine = region.local_tokens();
        REQUIRE(sum.dim(0) == mine.size());
        REQUIRE(sum.dtype() == DType::kBF16);
        CHECK(static_cast<std::byte*>(sum.raw()) ==
              static_cast<std::byte*>(partial.raw()) + mine.begin * kCols * size_of(DType::kBF16));
        for (int64_t i = 0; i < sum.numel(); ++i) {
          const float want = whole(mine.begin * kCols + i) * static_cast<float>(ranks * (ranks + 1) / 2);
          CHECK(static_cast<float>(sum.data<BF16>()[i]) == want);
        }
      });
    }
  }
}

TEST_CASE("with token blocks slices are whole ones") {
  constexpr int64_t kBlock = 4;
  for (const int ranks : {1, 2, 3, 5}) {
    run_thread_ranks(ranks, [&](Communicator& world) {
      for (const int64_t tokens : {20, 36}) {
        for (const bool sequence : {false, true}) {
          TensorRegion region(world, sequence, kBlock);
          region.set_tokens(tokens);
          REQUIRE(std::ssize(region.slices()) == (sequence ? ranks : 1));
          int64_t next = 0;
          for (const Range& slice : region.slices()) {
            CHECK(slice.begin == next);
            CHECK(slice.size() % kBlock == 0);
            next = slice.end;
          }
          CHECK(next == tokens);
        }
      }
    });
  }
}
