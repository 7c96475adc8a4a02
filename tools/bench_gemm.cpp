// bench_gemm [portable|avx2|avx512]: speed of the CPU matrix product beside OpenBLAS and beside the machine's peak.
// All numbers are GFLOP/s of the fastest of many runs; the contestants take turns, so that other load hits them alike.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "bench_gemm_openblas.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/format.h"
#include "ops/cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using invar::BF16;
using invar::ops::cpu::GemmIsa;

struct Shape {
  std::string_view what;
  int64_t m, n, k;
  bool transpose_a, transpose_b;

  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
};

constexpr std::array kShapes = {
    Shape{"square", 512, 512, 512, false, false},
    Shape{"square", 1024, 1024, 1024, false, false},
    Shape{"square", 2048, 2048, 2048, false, false},
    Shape{"forward", 512, 3072, 1024, false, true},
    Shape{"forward", 512, 1024, 3072, false, true},
    Shape{"data gradient", 512, 1024, 3072, false, false},
    Shape{"weight gradient", 3072, 1024, 512, true, false},
    Shape{"head", 512, 8192, 512, false, true},
    Shape{"odd", 509, 1021, 769, false, false},
    Shape{"few rows", 8, 1024, 1024, false, true},
    Shape{"one row", 1, 1024, 1024, false, true},
    Shape{"tiny", 64, 64, 64, false, false},
};

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The fastest run of each contestant.
std::vector<double> fastest(std::span<const std::function<void()>> contestants) {
  constexpr double kSecondsEach = 0.4;
  constexpr int kMinRounds = 5;
  std::vector<double> best(contestants.size(), std::numeric_limits<double>::infinity());
  for (const auto& run : contestants) run();
  double spent = 0.0;
  for (int round = 0; round < kMinRounds || spent < kSecondsEach * static_cast<double>(best.size()); ++round) {
    for (size_t i = 0; i < best.size(); ++i) {
      const double seconds = seconds_of(contestants[i]);
      best[i] = std::min(best[i], seconds);
      spent += seconds;
    }
  }
  return best;
}

// Multiply-adds on registers alone, in chains enough to fill the pipes. Each returns the sum, so that none is dropped.
constexpr int kPeakSteps = 1 << 18;
constexpr int kChains = 12;

float peak_portable() {
  float sum[kChains] = {};
  for (int step = 0; step < kPeakSteps; ++step) {
    for (float& value : sum) value = std::fma(value, 0.5f, 1.0f);
  }
  return sum[0] + sum[kChains - 1];
}

#if defined(__x86_64__)

[[gnu::target("avx2,fma")]] float peak_avx2() {
  __m256 sum[kChains];
  for (__m256& value : sum) value = _mm256_setzero_ps();
  for (int step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (__m256& value : sum) value = _mm256_fmadd_ps(value, _mm256_set1_ps(0.5f), _mm256_set1_ps(1.0f));
  }
  float out = 0.0f;
  for (const __m256& value : sum) out += _mm256_cvtss_f32(value);
  return out;
}

[[gnu::target("avx512f")]] float peak_avx512() {
  __m512 sum[kChains];
  for (__m512& value : sum) value = _mm512_setzero_ps();
  for (int step = 0; step < kPeakSteps; ++step) {
#pragma GCC unroll 12
    for (__m512& value : sum) value = _mm512_fmadd_ps(value, _mm512_set1_ps(0.5f), _mm512_set1_ps(1.0f));
  }
  float out = 0.0f;
  for (const __m512& value : sum) out += _mm512_cvtss_f32(value);
  return out;
}

#else

float peak_avx2() {
  return 0.0f;
}
float peak_avx512() {
  return 0.0f;
}

#endif

// GFLOP/s of one thread.
double peak_of(GemmIsa isa) {
  const int lanes = isa == GemmIsa::kAvx512 ? 16 : isa == GemmIsa::kAvx2 ? 8 : 1;
  const auto loop = isa == GemmIsa::kAvx512 ? peak_avx512 : isa == GemmIsa::kAvx2 ? peak_avx2 : peak_portable;
  volatile float sink = 0.0f;
  const std::function<void()> run[] = {[&] { sink = loop(); }};
  return 2.0 * kChains * kPeakSteps * lanes / fastest(run)[0] * 1e-9;
}

template <class T>
std::vector<T> random_values(int64_t count) {
  std::mt19937 generator(1);
  std::vector<T> out(static_cast<size_t>(count));
  for (T& value : out) value = static_cast<T>(static_cast<float>(generator()) * 0x1p-31f - 1.0f);
  return out;
}

void print_row(const Shape& shape, GemmIsa isa, int threads, double peak, bool openblas) {
  const auto a = random_values<float>(shape.m * shape.k);
  const auto b = random_values<float>(shape.k * shape.n);
  const auto a_bf16 = random_values<BF16>(shape.m * shape.k);
  const auto b_bf16 = random_values<BF16>(shape.k * shape.n);
  std::vector<float> c(static_cast<size_t>(shape.m * shape.n));
  std::vector<BF16> c_bf16(c.size());
  const auto product = [&](const auto& x, const auto& y, auto& out) {
    invar::ops::cpu::gemm(shape.m, shape.n, shape.k, x.data(), shape.transpose_a ? shape.m : shape.k, shape.transpose_a,
                          y.data(), shape.transpose_b, out.data(), false, threads, isa);
  };
  std::vector<std::function<void()>> contestants = {[&] { product(a, b, c); },
                                                    [&] { product(a_bf16, b_bf16, c_bf16); }};
  if (openblas) {
    contestants.push_back([&] {
      openblas_sgemm(shape.m, shape.n, shape.k, a.data(), shape.transpose_a, b.data(), shape.transpose_b, c.data(),
                     threads);
    });
  }
  std::vector<double> speed;
  for (const double seconds : fastest(contestants)) speed.push_back(shape.flops() / seconds * 1e-9);
  fmt::print("{:<16}{:>5}{:>6}{:>6}  {}{}{:>8}{:>9.1f}{:>8.0f}%{:>9.1f}", shape.what, shape.m, shape.n, shape.k,
             shape.transpose_a ? 'T' : 'N', shape.transpose_b ? 'T' : 'N', threads, speed[0],
             100.0 * speed[0] / (peak * threads), speed[1]);
  if (openblas) fmt::print("{:>10.1f}{:>7.2f}", speed[2], speed[0] / speed[2]);
  fmt::print("\n");
  std::fflush(stdout);
}

GemmIsa isa_from(std::span<char*> arguments) {
  if (arguments.size() < 2) return invar::ops::cpu::best_gemm_isa();
  for (const GemmIsa isa : {GemmIsa::kPortable, GemmIsa::kAvx2, GemmIsa::kAvx512}) {
    if (name_of(isa) == arguments[1] && arguments.size() == 2 && is_supported(isa)) return isa;
  }
  throw invar::Error(invar::ErrorKind::kConfig, "usage: bench_gemm [portable|avx2|avx512], if the processor has it");
}

void run(std::span<char*> arguments) {
  const GemmIsa isa = isa_from(arguments);
  const std::string openblas = openblas_description();
  const double peak = peak_of(isa);
  fmt::print("kernel         {}\npeak           {:.1f} GFLOP/s a thread (multiply-adds on registers)\n", name_of(isa),
             peak);
  fmt::print("OpenBLAS       {}\n", openblas.empty() ? "not found" : openblas);
  for (const char* name : {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}) {
    if (!openblas.empty() && std::getenv(name)) fmt::print("{} is set: OpenBLAS may be slower than it can be\n", name);
  }
  fmt::print("\n{:<16}{:>5}{:>6}{:>6}  {}{:>8}{:>9}{:>9}{:>9}", "", "M", "N", "K", "op", "threads", "fp32", "of peak",
             "bf16");
  fmt::print("{}\n", openblas.empty() ? "" : "  OpenBLAS  ratio");
  std::fflush(stdout);
  const int all = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  for (const Shape& shape : kShapes) {
    print_row(shape, isa, 1, peak, !openblas.empty());
    if (all > 1) print_row(shape, isa, all, peak, !openblas.empty());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv, static_cast<size_t>(argc)});
    return 0;
  } catch (const invar::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.kind());
  }
}
