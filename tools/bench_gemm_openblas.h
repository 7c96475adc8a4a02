#pragma once

#include <cstdint>
#include <string>

// OpenBLAS for bench_gemm to compare with. CMake builds one of two files: with it, or without.
// "OpenBLAS 0.3.21, Cooperlake kernels", or an empty string if it was not found.
std::string openblas_description();

// c (m, n) = op(a) op(b), all row-major, as ops::cpu::gemm. Does nothing without OpenBLAS.
void openblas_sgemm(int64_t m, int64_t n, int64_t k, const float* a, bool transpose_a, const float* b, bool transpose_b,
                    float* c, int threads);
