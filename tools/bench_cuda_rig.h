#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "device/arena.h"
#include "device/device.h"
#include "ops/numerics.h"

// Times operations on the first GPU and prints a row for each.
namespace invar::bench {

inline constexpr int64_t kPoolElements = int64_t{1} << 24;
inline constexpr int64_t kMemoryBytes = int64_t{24} << 30;
inline constexpr int64_t kBeyondCache = int64_t{256} << 20;
inline constexpr int64_t kMostSets = 64;
inline constexpr int kRepeats = 15;

struct Work {
  double bytes = 0;
  double flops = 0;  // if there are any, they are the floor
};

inline Work bytes(int64_t count) {
  return {static_cast<double>(count), 0};
}

inline Work products(int64_t m, int64_t n, int64_t k) {
  return {0, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k)};
}

using Run = std::function<void()>;

class Rig {
 public:
  // Rows whose name contains `filter` are measured.
  explicit Rig(std::string filter)
      : filter_(std::move(filter)),
        stream_(make_cuda_stream(0)),
        memory_("bench", DeviceType::kCuda, kMemoryBytes),
        timers_(kRepeats) {
    std::vector<float> values(static_cast<size_t>(kPoolElements));
    std::vector<BF16> rounded(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_);
      rounded[i] = BF16(values[i]);
    }
    pool_f32_ = memory_.allocate("pool", DType::kF32, {kPoolElements});
    pool_bf16_ = memory_.allocate("pool", DType::kBF16, {kPoolElements});
    copy_across(stream_, view_of(values), pool_f32_);
    copy_across(stream_, view_of(rounded), pool_bf16_);
  }

 protected:
  // --- operands ---

  Tensor make(DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor tensor = memory_.allocate("operand", dtype, shape);
    const Tensor& pool = dtype == DType::kF32 ? pool_f32_ : pool_bf16_;
    for (int64_t begin = 0; begin < tensor.numel(); begin += kPoolElements) {
      const int64_t count = std::min(kPoolElements, tensor.numel() - begin);
      auto* to = static_cast<std::byte*>(tensor.raw()) + begin * size_of(dtype);
      copy_across(stream_, pool.rows(0, count), Tensor(to, dtype, DeviceType::kCuda, {count}));
    }
    return tensor;
  }
  Tensor bf16(std::initializer_list<int64_t> shape) { return make(DType::kBF16, shape); }
  Tensor f32(std::initializer_list<int64_t> shape) { return make(DType::kF32, shape); }

  Tensor indices(int64_t count, int64_t below) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int32_t& value : values)
      value = std::uniform_int_distribution<int32_t>(0, static_cast<int32_t>(below) - 1)(random_);
    const Tensor tensor = memory_.allocate("indices", DType::kI32, {count});
    copy_across(stream_, view_of(values), tensor);
    return tensor;
  }

  // --- timing ---

  // Prints a row of what `prepare` makes: operands of its own and the operation on them.
  void row(const std::string& name, Work work, const std::function<Run()>& prepare) {
    if (name.find(filter_) == std::string::npos) return;
    try {
      report(name, work, seconds_of(prepare));
    } catch (const Error& error) {
      std::printf("| %s | %s | | |\n", name.c_str(), error.what());
    }
    std::fflush(stdout);
  }

  double seconds_of(const std::function<Run()>& prepare) {
    const ArenaScope scope(memory_);
    const int64_t before = memory_.used();
    std::vector<Run> sets{prepare()};
    const int64_t footprint = std::max<int64_t>(memory_.used() - before, 1);
    const int64_t count = std::clamp((kBeyondCache + footprint - 1) / footprint, int64_t{1}, kMostSets);
    while (std::ssize(sets) < count) sets.push_back(prepare());
    const auto run_all = [&] {
      for (const Run& run : sets) run();
    };
    run_all();
    run_all();
    synchronize(stream_);
    for (DeviceTimer& timer : timers_) {
      timer.start(stream_);
      run_all();
      timer.stop(stream_);
    }
    synchronize(stream_);
    std::vector<double> times;
    for (const DeviceTimer& timer : timers_) times.push_back(timer.milliseconds() * 1e-3 / static_cast<double>(count));
    std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
    return times[kRepeats / 2];
  }

  void report(const std::string& name, Work work, double seconds) const {
    const bool computes = work.flops > 0;
    const double rate = (computes ? work.flops : work.bytes) / seconds;
    const double best = computes ? flops_per_second_ : bytes_per_second_;
    const std::string shown = computes ? format("{:.1f} TFLOP/s", rate * 1e-12)
                                       : format("{:.1f} MB, {:.0f} GB/s", work.bytes * 1e-6, rate * 1e-9);
    const std::string ratio = best > 0 ? format("{:.2f}", best / rate) : "no floor";
    std::printf("| %s | %.4f | %s | %s |\n", name.c_str(), seconds * 1e3, shown.c_str(), ratio.c_str());
  }

  std::string filter_;
  Stream stream_;
  static constexpr ops::Numerics kInvariant{true};
  Arena memory_;
  std::vector<DeviceTimer> timers_;
  std::mt19937 random_;
  Tensor pool_f32_, pool_bf16_;
  double bytes_per_second_ = 0;
  double flops_per_second_ = 0;
};

}  // namespace invar::bench
