#include "bench_gemm_openblas.h"

#include <cblas.h>

std::string openblas_description() {
  const std::string config = openblas_get_config();  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..."
  return config.substr(0, config.find(' ', config.find(' ') + 1)) + ", " + openblas_get_corename() + " kernels";
}

void openblas_sgemm(int64_t m, int64_t n, int64_t k, const float* a, bool transpose_a, const float* b, bool transpose_b,
                    float* c, int threads) {
  openblas_set_num_threads(threads);
  const auto size = [](int64_t value) { return static_cast<blasint>(value); };
  cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans, size(m),
              size(n), size(k), 1.0f, a, size(transpose_a ? m : k), b, size(transpose_b ? k : n), 0.0f, c, size(n));
}
