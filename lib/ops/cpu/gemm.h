#pragma once

#include <cstdint>
#include <string_view>

namespace invar::ops::cpu {

// The instruction sets that the inner kernel exists for. All give the same bits.
enum class GemmIsa : uint8_t { kPortable, kAvx2, kAvx512 };

std::string_view name_of(GemmIsa isa);
bool is_supported(GemmIsa isa);  // by this binary and this processor
GemmIsa best_gemm_isa();

// c (m, n) = op(a) (m, k) · op(b) (k, n), plus c if accumulate. All are row-major as stored: a is (m, k), or (k, m) if
// transpose_a, with a_stride elements from row to row; b is (k, n), or (n, k) if transpose_b, dense as c is. c must not
// overlap a or b.
// Each element is s = 0; s = RN32(s + a·b) over ascending k; then RN32(s + c) if accumulate; then rounded to Out.
// In, Out: float or BF16. Throws Error if this machine does not support isa or has no memory for packing.
template <class In, class Out>
void gemm(int64_t m, int64_t n, int64_t k, const In* a, int64_t a_stride, bool transpose_a, const In* b,
          bool transpose_b, Out* c, bool accumulate, int threads, GemmIsa isa = best_gemm_isa());

}  // namespace invar::ops::cpu
