#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

// Instructions of compute capability 9.0: barriers in shared memory, copies of tiles by the copy engine of an SM to one
// or more blocks of a cluster, and products of a warpgroup (128 threads) on tensor cores. Source: the PTX manual.
namespace invar::ops::cuda::hopper {

// Barriers; `barrier` is an address in shared memory. Phases alternate between parity 0 and 1.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Barriers that were initialised are seen by the copy engine and by the other blocks of the cluster.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives and lets the phase wait for so many bytes of copies too.
__device__ inline void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the same barrier of a block of the cluster. What other blocks see of this one's memory is not ordered by
// it: that would be a fence of the whole GPU.
__device__ inline void arrive_at(uint32_t barrier, uint32_t block_of_cluster) {
  asm volatile(
      "{\n\t.reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
      "r"(block_of_cluster)
      : "memory");
}
__device__ inline void wait_at(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline uint32_t block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Starts to copy the box of a tensor map at (x, y) to `to` of every block of the cluster in `blocks` (a bit each);
// each of them counts the bytes at its own `barrier`. Beyond the tensor there are zeros.
__device__ inline void copy_box(const CUtensorMap& map, int x, int y, uint32_t to, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// A matrix operand in shared memory, in rows of 128 bytes whose chunks of 16 bytes are permuted by the row (as the copy
// engine does with CU_TENSOR_MAP_SWIZZLE_128B). Steps in bytes: from one 128-byte column of rows to the next, and from
// 8 rows to the next 8. The first row's address is a multiple of 1024, but for a move within a row.
__device__ inline uint64_t describe(uint32_t address, int column_step, int rows_step) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(rows_step >> 4) << 32 | static_cast<uint64_t>(column_step >> 4) << 16 |
         static_cast<uint64_t>((address & 0x3ffff) >> 4);
}

// The same, so many bytes on.
__device__ inline uint64_t moved(uint64_t operand, int bytes) {
  return operand + static_cast<uint64_t>(bytes >> 4);
}

// Registers of a thread from here on; for all threads of a warpgroup.
template <int kRegisters>
__device__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Before the first product that reads what registers or shared memory hold.
__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All products are done but for those of the last kPending commits.
template <int kPending>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of the sums before the wait.
template <int kCount>
__device__ void hold_sums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// c (64 × 128) = a (64 × 16, rows of k) · b (16 × 128, rows of n), plus c if `add`: bf16 in, fp32 sums. Of a warpgroup
// thread 32w + 4g + t holds rows 16w + g (c[4j], c[4j + 1]) and 16w + g + 8 (c[4j + 2], c[4j + 3]) in columns 8j + 2t
// and the next.
__device__ inline void multiply_64x128(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1, 0, 1;\n\t}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
        "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
        "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
        "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

}  // namespace invar::ops::cuda::hopper
