#include <array>

#include "like_cpu.h"
#include "ops/cross_entropy.h"

namespace invar::ops {
namespace {

using namespace invar::test;

const Stream kThreads(DeviceType::kCpu, 8);

// A chunk of logits of one rank: columns [first, first + width), of which `count` are tokens and the rest padding,
// which holds what must not be looked at.
struct Chunk {
  Chunk(int64_t n_, int64_t width_, int64_t count, int64_t first = 0, double spread = 20.0)
      : n(n_),
        width(width_),
        vocabulary{first, first + width},
        vocabulary_size(first + count),
        logits(random_tensor(DType::kF32, {n, width}, 1, spread, 3.0)),
        labels(DType::kI32, {n}) {
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t c = count; c < width; ++c) logits.set(at(t, c), c % 2 ? 1e30 : std::nan(""));
      // Masked, the first and last token, some token of this rank, and one of another.
      const int64_t choice[] = {-100, first, first + count - 1, first + (t * 7919) % std::max<int64_t>(count, 1),
                                first > 0 ? 0 : vocabulary_size};
      labels.set(static_cast<size_t>(t), static_cast<double>(choice[t % 5]));
    }
  }
  size_t at(int64_t row, int64_t column) const { return static_cast<size_t>(row * width + column); }

  int64_t n, width;
  Range vocabulary;
  int64_t vocabulary_size;
  HostTensor logits, labels;
};

struct Statistics {
  explicit Statistics(int64_t n) : maximum(DType::kF32, {n}), sum(DType::kF32, {n}), target(DType::kF32, {n}) {}
  HostTensor maximum, sum, target;
};

Statistics cpu_statistics(const Chunk& chunk) {
  Statistics out(chunk.n);
  logits_statistics(kThreads, chunk.logits, {0, chunk.width}, chunk.labels, chunk.vocabulary, chunk.vocabulary_size,
                    out.maximum, out.sum, out.target);
  return out;
}

Statistics gpu_statistics(const Chunk& chunk) {
  const DeviceTensor logits(chunk.logits), labels(chunk.labels);
  const Statistics empty(chunk.n);
  const DeviceTensor maximum(empty.maximum), sum(empty.sum), target(empty.target);
  logits_statistics(gpu(), logits, {0, chunk.width}, labels, chunk.vocabulary, chunk.vocabulary_size, maximum, sum,
                    target);
  Statistics out(chunk.n);
  copy_across(gpu(), maximum, out.maximum);
  copy_across(gpu(), sum, out.sum);
  copy_across(gpu(), target, out.target);
  return out;
}

// Chunks of every kind: aligned and odd rows, padding, another rank's columns, the widths of real vocabularies.
Chunk any_chunk() {
  return GENERATE(values<Chunk>({{1, 1, 1},
                                 {6, 7, 5},
                                 {6, 48, 37},
                                 {11, 513, 513, 1000},
                                 {11, 2048, 2048, 2048},
                                 {5, 8192, 8190, 500},
                                 {7, 18992, 18992, 37984},
                                 {3, 50001, 49000},
                                 {5, 151936, 151669},
                                 {5, 262144, 262144}}));
}

TEST_CASE("logits_statistics on the GPU") {
  const Chunk chunk = any_chunk();
  CAPTURE(chunk.n, chunk.width, chunk.vocabulary_size);
  const Statistics wanted = cpu_statistics(chunk), actual = gpu_statistics(chunk), again = gpu_statistics(chunk);
  CHECK(actual.maximum.same_bits(wanted.maximum));
  CHECK(actual.target.same_bits(wanted.target));
  require_close(actual.sum.values(), wanted.sum.values(), 1e-6, 0);
  CHECK(again.sum.same_bits(actual.sum));
}

TEST_CASE("logits_statistics on the GPU of many rows of flat logits") {
  const Chunk chunk(2048, 4096, 4096, 0, 0.01);
  const Statistics wanted = cpu_statistics(chunk), actual = gpu_statistics(chunk);
  CHECK(actual.maximum.same_bits(wanted.maximum));
  CHECK(actual.target.same_bits(wanted.target));
  require_close(actual.sum.values(), wanted.sum.values(), 1e-6, 0);
}

TEST_CASE("logits_statistics on the GPU of padding, huge logits and NaN") {
  const Statistics padding = gpu_statistics(Chunk(5, 64, 0, 640));
  for (size_t t = 0; t < 5; ++t) {
    CHECK(padding.maximum[t] == -INFINITY);
    CHECK(padding.sum[t] == 0);
    CHECK(padding.target[t] == 0);
  }
  Chunk chunk(3, 4000, 4000);
  chunk.logits.set(chunk.at(0, 3999), 1e30);
  chunk.logits.set(chunk.at(1, 17), -INFINITY);
  chunk.logits.set(chunk.at(2, 2000), std::nan(""));
  const Statistics actual = gpu_statistics(chunk), wanted = cpu_statistics(chunk);
  CHECK(actual.maximum.same_bits(wanted.maximum));
  CHECK(actual.sum[0] == 1);
  CHECK(actual.sum[1] == Approx(wanted.sum[1]).epsilon(1e-6));
  CHECK(std::isnan(actual.sum[2]));  // never hidden
}

TEST_CASE("logits_statistics on the GPU of some columns has the bits of a copy of them") {
  const int64_t n = 6, width = 9000;
  const Range columns = GENERATE(Range{0, 9000}, Range{2048, 6000}, Range{8000, 9000}, Range{4000, 4000}, Range{5, 18});
  CAPTURE(columns.begin, columns.end);
  const Chunk chunk(n, width, 8500, 1000);  // some of them padding
  HostTensor copied(DType::kF32, {n, columns.size()});
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t c = columns.begin; c < columns.end; ++c) {
      copied.set(static_cast<size_t>(t * columns.size() + c - columns.begin), chunk.logits[chunk.at(t, c)]);
    }
  }
  const DeviceTensor logits(chunk.logits), part(copied), labels(chunk.labels);
  const HostTensor empty(DType::kF32, {n});
  const auto statistics = [&](const Tensor& of, Range those, int64_t first) {
    const DeviceTensor maximum(empty), sum(empty), target(empty);
    logits_statistics(gpu(), of, those, labels, {first, first + of.dim(1)}, chunk.vocabulary_size, maximum, sum,
                      target);
    return std::array{maximum.host(), sum.host(), target.host()};
  };
  const int64_t first = chunk.vocabulary.begin;
  const auto there = statistics(logits, columns, first),
             apart = statistics(part, {0, columns.size()}, first + columns.begin);
  for (size_t i = 0; i < there.size(); ++i) CHECK(there[i].same_bits(apart[i]));
}

TEST_CASE("rescale_sum_exp and token_losses on the GPU") {
  const int64_t n = GENERATE(0, 1, 255, 8192);
  HostTensor own = random_tensor(DType::kF32, {n}, 1, 30.0), sum = random_tensor(DType::kF32, {n}, 2, 1000.0, 1001.0);
  HostTensor maximum = own, labels(DType::kI32, {n});
  for (size_t t = 0; t < own.size(); ++t) {
    maximum.set(t, own[t] + static_cast<double>(t % 7));
    labels.set(t, t % 5 == 0 ? -1.0 : 3.0);
    if (t % 11 != 0) continue;
    own.set(t, -INFINITY);  // padding only
    sum.set(t, 0);
  }
  const HostTensor target = random_tensor(DType::kF32, {n}, 3, 30.0);
  const DeviceTensor device_sum(sum), device_maximum(maximum);
  rescale_sum_exp(gpu(), DeviceTensor(own), device_maximum, device_sum);
  rescale_sum_exp(kCpu, own, maximum, sum);
  require_close(device_sum.host().values(), sum.values(), 1e-6, 0);

  for (size_t t = 0; t < sum.size(); ++t) sum.set(t, sum[t] + 1);
  const HostTensor empty(DType::kF32, {n});
  HostTensor losses(DType::kF32, {n});
  const DeviceTensor device_losses(empty);
  token_losses(gpu(), DeviceTensor(labels), device_maximum, DeviceTensor(sum), DeviceTensor(target), device_losses);
  token_losses(kCpu, labels, maximum, sum, target, losses);
  require_close(device_losses.host().values(), losses.values(), 2e-7, 1e-6);
}

TEST_CASE("logits_gradient on the GPU") {
  const Chunk chunk = any_chunk();
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float cap = GENERATE(0.0f, 30.0f), scale = 0.37f;
  CAPTURE(chunk.n, chunk.width, chunk.vocabulary_size, name_of(dtype), cap);
  const Statistics statistics = cpu_statistics(chunk);
  const std::vector<int64_t> shape = {chunk.n, chunk.width};
  HostTensor wanted(dtype, shape);
  logits_gradient(kThreads, chunk.logits, chunk.labels, chunk.vocabulary, chunk.vocabulary_size, statistics.maximum,
                  statistics.sum, scale, cap, wanted);

  const DeviceTensor logits(chunk.logits), labels(chunk.labels), maximum(statistics.maximum), sum(statistics.sum);
  const DeviceTensor d_logits{HostTensor(dtype, shape)};
  const auto run = [&](const Tensor& into) {
    logits_gradient(gpu(), logits, labels, chunk.vocabulary, chunk.vocabulary_size, maximum, sum, scale, cap, into);
  };
  run(d_logits);
  const HostTensor actual = d_logits.host();
  require_close(actual.values(), wanted.values(), dtype == DType::kF32 ? 3e-6 : 0x1.01p-7, 1e-7);
  for (int64_t t = 0; t < chunk.n; ++t) {
    const bool masked = chunk.labels[static_cast<size_t>(t)] < 0;
    for (int64_t c = masked ? 0 : chunk.vocabulary_size - chunk.vocabulary.begin; c < chunk.width; ++c) {
      if (actual[chunk.at(t, c)] != 0) FAIL_CHECK("row " << t << ", column " << c << " is not 0");
    }
  }
  run(d_logits);
  CHECK(d_logits.host().same_bits(actual));
  if (dtype != DType::kF32) return;
  run(logits);  // in the logits' own buffer
  CHECK(logits.host().same_bits(actual));
}

TEST_CASE("cross entropy on the GPU of rows at any alignment") {
  const int64_t width = GENERATE(37, 38, 40);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Chunk chunk(6, width, width - 2);
  const DeviceTensor logits(chunk.logits), labels(chunk.labels), d_logits{HostTensor(dtype, {6, width})};
  const HostTensor empty(DType::kF32, {6});
  const DeviceTensor maximum(empty), sum(empty), target(empty);
  HostTensor host_logits = chunk.logits, d_host(dtype, {6, width});
  const auto run = [&](const Stream& stream, int64_t t, const Tensor& x, const Tensor& label, const Tensor& m,
                       const Tensor& s, const Tensor& hit, const Tensor& d) {
    const auto row = [&](const Tensor& tensor) { return tensor.rows(t, t + 1); };
    softcap(stream, 30.0f, row(x));
    logits_statistics(stream, row(x), {0, width}, row(label), chunk.vocabulary, chunk.vocabulary_size, row(m), row(s),
                      row(hit));
    logits_gradient(stream, row(x), row(label), chunk.vocabulary, chunk.vocabulary_size, row(m), row(s), 0.5f, 30.0f,
                    row(d));
  };
  HostTensor m = empty, s = empty, hit = empty;
  for (int64_t t = 1; t < 5; ++t) {
    run(gpu(), t, logits, labels, maximum, sum, target, d_logits);
    run(kCpu, t, host_logits, chunk.labels, m, s, hit, d_host);
  }
  const HostTensor actual = d_logits.host(), capped = logits.host();
  for (size_t i = 0; i < actual.size(); ++i) {
    const size_t t = i / static_cast<size_t>(width);
    if (t == 0 || t == 5) {
      CHECK(std::isnan(actual[i]));
      CHECK((capped[i] == chunk.logits[i] || std::isnan(chunk.logits[i])));
    } else {
      CHECK(actual[i] == Approx(d_host[i]).epsilon(dtype == DType::kF32 ? 2e-5 : 0x1p-7).margin(1e-7));
    }
  }
}

TEST_CASE("cross entropy on the GPU refuses rows in packs that are not aligned") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const DeviceTensor flat{HostTensor(DType::kF32, {41})}, row{HostTensor(DType::kF32, {1, 40})};
  const DeviceTensor odd{HostTensor(dtype, {41})}, labels{HostTensor(DType::kI32, {1})};
  const DeviceTensor m{HostTensor(DType::kF32, {1})}, s{HostTensor(DType::kF32, {1})},
      hit{HostTensor(DType::kF32, {1})};
  require_error(ErrorKind::kFault, {"logits_statistics", "not aligned to 16 bytes"}, [&] {
    logits_statistics(gpu(), from_second(flat, {1, 40}), {0, 40}, labels, {0, 40}, 40, m, s, hit);
  });
  require_error(ErrorKind::kFault, {"logits_statistics", "columns [2, 10)", "not aligned to 16 bytes"}, [&] {
    logits_statistics(gpu(), row, {2, 10}, labels, {0, 40}, 40, m, s, hit);
  });
  require_error(ErrorKind::kFault, {"logits_gradient", "not aligned"}, [&] {
    logits_gradient(gpu(), row, labels, {0, 40}, 40, m, s, 1.0f, 0.0f, from_second(odd, {1, 40}));
  });
}

TEST_CASE("softcap on the GPU") {
  const float cap = GENERATE(30.0f, 0.7f);
  const auto [rows, width] = GENERATE(table<int64_t, int64_t>({{0, 5}, {1, 1}, {3, 7}, {3, 1023}, {64, 5000}}));
  HostTensor x = random_tensor(DType::kF32, {rows, width}, 1, 100.0);
  if (x.size() > 3) {
    x.set(1, INFINITY);
    x.set(2, -1e-30);
  }
  const DeviceTensor device(x);
  softcap(gpu(), cap, device);
  softcap(kCpu, cap, x);
  require_close(device.host().values(), x.values(), 6e-7, 0);
}

TEST_CASE("cross entropy on the GPU of no tokens") {
  const Chunk none(0, 5, 5);
  CHECK(gpu_statistics(none).sum.size() == 0);
  const DeviceTensor logits(none.logits), labels(none.labels), f{HostTensor(DType::kF32, {0})};
  logits_gradient(gpu(), logits, labels, {0, 5}, 5, f, f, 1.0f, 0.0f, logits);
  synchronize(gpu());
}

}  // namespace
}  // namespace invar::ops
