#include "host_tensor.h"
#include "ops/cpu/parallel.h"
#include "ops/cross_entropy.h"

namespace invar::ops {
namespace {

using namespace invar::test;
const double kInfinity = std::numeric_limits<double>::infinity();

// Losses and gradients of n rows whose columns lie on several ranks: the three local steps, and the reductions between.
struct Result {
  HostTensor losses, gradient;
};

Result run(const HostTensor& logits, const HostTensor& labels, int64_t vocabulary_size, const std::vector<Range>& parts,
           float scale, float cap, DType dtype, const Stream& stream = kCpu) {
  const int64_t n = logits.tensor().dim(0), width = logits.tensor().dim(1);
  const auto rows = static_cast<size_t>(n);
  HostTensor maximum(DType::kF32, {n}, Values(rows, -kInfinity));
  HostTensor sum(DType::kF32, {n}, Values(rows, 0.0)), target = sum;
  Result result{HostTensor(DType::kF32, {n}), HostTensor(dtype, {n, width})};

  HostTensor whole = logits;
  if (cap > 0) softcap(stream, cap, whole);
  std::vector<HostTensor> locals, own_maxima, own_sums;
  for (const Range part : parts) {
    HostTensor& local = locals.emplace_back(DType::kF32, std::vector<int64_t>{n, part.size()});
    HostTensor& part_maximum = own_maxima.emplace_back(DType::kF32, std::vector<int64_t>{n});
    HostTensor& part_sum = own_sums.emplace_back(DType::kF32, std::vector<int64_t>{n});
    HostTensor part_target(DType::kF32, {n});
    for (size_t i = 0; i < local.size(); ++i) {
      const size_t row = i / static_cast<size_t>(part.size()), column = i % static_cast<size_t>(part.size());
      local.set(i, logits[row * static_cast<size_t>(width) + static_cast<size_t>(part.begin) + column]);
    }
    if (cap > 0) softcap(stream, cap, local);
    logits_statistics(stream, local, {0, part.size()}, labels, part, vocabulary_size, part_maximum, part_sum,
                      part_target);
    const HostTensor empty(DType::kF32, {n});
    HostTensor column_maximum = empty, column_sum = empty, column_target = empty;
    logits_statistics(stream, whole, part, labels, {0, width}, vocabulary_size, column_maximum, column_sum,
                      column_target);
    CHECK(column_maximum.same_bits(part_maximum));
    CHECK(column_sum.same_bits(part_sum));
    CHECK(column_target.same_bits(part_target));
    for (size_t t = 0; t < rows; ++t) {
      if (part.begin >= vocabulary_size) {
        CHECK((part_maximum[t] == -kInfinity && part_sum[t] == 0 && part_target[t] == 0));
      }
      maximum.set(t, std::max(maximum[t], part_maximum[t]));
      target.set(t, target[t] + part_target[t]);
    }
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    rescale_sum_exp(stream, own_maxima[p], maximum, own_sums[p]);
    for (size_t t = 0; t < rows; ++t) sum.set(t, sum[t] + own_sums[p][t]);
  }
  token_losses(stream, labels, maximum, sum, target, result.losses);
  for (size_t p = 0; p < parts.size(); ++p) {
    HostTensor d_local(dtype, {n, parts[p].size()});
    logits_gradient(stream, locals[p], labels, parts[p], vocabulary_size, maximum, sum, scale, cap, d_local);
    for (size_t i = 0; i < d_local.size(); ++i) {
      const size_t row = i / static_cast<size_t>(parts[p].size()), column = i % static_cast<size_t>(parts[p].size());
      result.gradient.set(row * static_cast<size_t>(width) + static_cast<size_t>(parts[p].begin) + column, d_local[i]);
    }
    if (dtype != DType::kF32) continue;
    logits_gradient(stream, locals[p], labels, parts[p], vocabulary_size, maximum, sum, scale, cap, locals[p]);
    CHECK(locals[p].same_bits(d_local));  // in the logits' own buffer
  }
  return result;
}

Values reference_losses(Values logits, const HostTensor& labels, size_t width, size_t vocabulary_size, float cap = 0) {
  const auto bound = static_cast<double>(cap);
  if (cap > 0) {
    for (double& logit : logits) logit = bound * std::tanh(logit / bound);
  }
  Values losses(labels.size(), 0.0);
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] < 0) continue;
    const double* row = logits.data() + t * width;
    const double peak = *std::max_element(row, row + vocabulary_size);
    double sum = 0;
    for (size_t c = 0; c < vocabulary_size; ++c) sum += std::exp(row[c] - peak);
    losses[t] = std::log(sum) + peak - row[static_cast<size_t>(labels[t])];
  }
  return losses;
}

TEST_CASE("statistics of some columns of a rank that does not hold the first tokens") {
  // Tokens 100 to 111, of which the last three are padding; of them 104 to 110.
  const HostTensor logits(DType::kF32, {2, 12}, {9, 9, 9, 9, 1, 2, 3, 4, 0, 1e30, 1e30, 9,  //
                                                 9, 9, 9, 9, 5, 5, 5, 5, 5, 1e30, 1e30, 9});
  const HostTensor labels(DType::kI32, {2}, {106, 111}), none(DType::kF32, {2});
  HostTensor maximum = none, sum = none, target = none;
  logits_statistics(kCpu, logits, {4, 11}, labels, {100, 112}, 109, maximum, sum, target);
  CHECK(maximum.values() == Values{4, 5});
  CHECK(sum[0] == Approx(std::exp(-3) + std::exp(-2) + std::exp(-1) + 1 + std::exp(-4)).epsilon(1e-6));
  CHECK(sum[1] == 5);
  CHECK(target.values() == Values{3, 0});
}

TEST_CASE("cross entropy over 1, 2 and 3 parts of a padded vocabulary") {
  const int64_t n = 6, width = 48, vocabulary_size = 37;
  const float scale = 0.25f;
  const double spread = GENERATE(1.0, 90.0);  // 90: exp of the raw logits would overflow
  const float cap = GENERATE(0.0f, 30.0f);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto parts = GENERATE(values<std::vector<Range>>({{{0, 48}},
                                                          {{0, 24}, {24, 48}},
                                                          {{0, 20}, {20, 40}, {40, 48}},
                                                          {{0, 1}, {1, 37}, {37, 48}},
                                                          {{0, 48}, {48, 48}}}));
  HostTensor logits = random_tensor(DType::kF32, {n, width}, 1, spread, spread);
  const HostTensor labels(DType::kI32, {n}, {0, 36, 20, -100, 19, 23});
  for (size_t i = 0; i < logits.size(); ++i) {
    if (i % 48 >= 37) logits.set(i, i % 2 ? 1e30 : std::nan(""));  // padding must not be looked at
  }
  Values clean = logits.values();
  for (size_t i = 0; i < clean.size(); ++i) {
    if (i % 48 >= 37) clean[i] = 0;
  }
  const Result result = run(logits, labels, vocabulary_size, parts, scale, cap, dtype);
  require_close(result.losses.values(), reference_losses(clean, labels, 48, 37, cap), 1e-6, 1e-6);
  const auto loss = [&](const Values& x) {
    double total = 0;
    for (double value : reference_losses(x, labels, 48, 37, cap)) total += value;
    return total * static_cast<double>(scale);
  };
  // exp of a difference of logits up to 180 carries their fp32 rounding: 180 · 2^-24.
  const double rounding = dtype == DType::kF32 ? 1e-5 : 0x1.02p-8;
  require_close(result.gradient.values(), numeric_gradient(loss, clean), rounding, 1e-7);
  for (size_t c = 0; c < 48; ++c) CHECK(result.gradient[3 * 48 + c] == 0);
}

TEST_CASE("softcap is cap · tanh(x / cap), and writes nothing else") {
  const float cap = GENERATE(30.0f, 0.7f);
  const int64_t width = GENERATE(1, 7, 8, 37, 40000);
  const HostTensor x = random_tensor(DType::kF32, {3, width}, 1, 100.0);
  HostTensor one = x, two = x;
  softcap(kCpu, cap, one.tensor().rows(1, 2));
  softcap(kTwoThreads, cap, two.tensor().rows(1, 2));
  Values expected = x.values();
  const auto w = static_cast<size_t>(width);
  for (size_t i = w; i < 2 * w; ++i) {
    expected[i] = static_cast<double>(cap) * std::tanh(expected[i] / static_cast<double>(cap));
  }
  require_close(one.values(), expected, 4e-7, 0);
  for (size_t i = 0; i < x.size(); ++i) {
    if (i / w != 1) CHECK(one[i] == x[i]);
  }
  CHECK(two.same_bits(one));
}

TEST_CASE("cross entropy of a row of one huge logit, and of NaN") {
  const HostTensor logits(DType::kF32, {2, 3}, {-1e30, 1e30, 0, 0, std::nan(""), 1});
  const HostTensor labels(DType::kI32, {2}, {1, 0});
  const Result result = run(logits, labels, 3, {{0, 3}}, 1.0f, 0.0f, DType::kF32);
  CHECK(result.losses[0] == 0);
  for (size_t c = 0; c < 3; ++c) CHECK(result.gradient[c] == 0);
  CHECK(std::isnan(result.losses[1]));  // never hidden
}

TEST_CASE("cross entropy of a wide row is as exact as fp32 sums in blocks") {
  const int64_t width = 50001;
  const HostTensor logits = random_tensor(DType::kF32, {1, width}, 7);
  const HostTensor labels(DType::kI32, {1}, {50000});
  const Result result = run(logits, labels, width, {{0, width}}, 1.0f, 0.0f, DType::kF32);
  const double expected = reference_losses(logits.values(), labels, 50001, 50001)[0];
  CHECK(std::abs(result.losses[0] - expected) <= 1e-6 * expected);
}

TEST_CASE("cross entropy gives the same bits on two threads") {
  const float cap = GENERATE(0.0f, 30.0f);
  const int64_t n = 65, width = 513;
  REQUIRE(n * width >= 2 * cpu::kMinWorkPerThread);
  const HostTensor logits = random_tensor(DType::kF32, {n, width}, 1, 5.0);
  HostTensor labels(DType::kI32, {n});
  for (size_t t = 0; t < labels.size(); ++t) labels.set(t, static_cast<double>(t * 7));
  const Result one = run(logits, labels, 500, {{0, width}}, 0.5f, cap, DType::kBF16, kCpu);
  const Result two = run(logits, labels, 500, {{0, width}}, 0.5f, cap, DType::kBF16, kTwoThreads);
  CHECK(two.losses.same_bits(one.losses));
  CHECK(two.gradient.same_bits(one.gradient));
}

TEST_CASE("cross entropy of no tokens, on meta, and of wrong operands") {
  const HostTensor none(DType::kF32, {0, 5}), no_labels(DType::kI32, {0});
  softcap(kCpu, 30.0f, none);
  CHECK(run(none, no_labels, 5, {{0, 5}}, 1.0f, 0.0f, DType::kF32).losses.size() == 0);

  const HostTensor logits(DType::kF32, {2, 5}), labels(DType::kI32, {2}), f(DType::kF32, {2}), bf16(DType::kBF16, {2});
  const auto meta = [](const HostTensor& t) { return t.on(DeviceType::kMeta); };
  logits_statistics(kMeta, meta(logits), {0, 5}, meta(labels), {0, 5}, 5, meta(f), meta(f), meta(f));
  rescale_sum_exp(kMeta, meta(f), meta(f), meta(f));
  token_losses(kMeta, meta(labels), meta(f), meta(f), meta(f), meta(f));
  logits_gradient(kMeta, meta(logits), meta(labels), {0, 5}, 5, meta(f), meta(f), 1.0f, 30.0f, meta(logits));
  softcap(kMeta, 30.0f, meta(logits));

  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              logits_statistics(kCpu, logits, {0, 5}, labels, {0, 6}, 5, f, f, f);
                            }),
                 "logits is f32 (2, 5), expected f32 (2, 6)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              logits_statistics(kCpu, logits, {3, 6}, labels, {0, 5}, 5, f, f, f);
                            }),
                 "columns [3, 6) of f32 (2, 5)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              logits_statistics(kCpu, logits, {0, 5}, labels, {0, 5}, 5, bf16, f, f);
                            }),
                 "maximum is bf16 (2)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              logits_statistics(kCpu, logits, {0, 5}, f, {0, 5}, 5, f, f, f);
                            }),
                 "labels is f32 (2)"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { token_losses(kCpu, labels, f, no_labels, f, f); }),
                 "sum is i32 (0)"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              logits_gradient(kCpu, logits, labels, {0, 5}, 5, f, f, 1.0f, 0.0f, f);
                            }),
                 "d_logits is"));
  CHECK(contains(message_of(ErrorKind::kFault, [&] { softcap(kCpu, 0.0f, logits); }), "softcap: cap 0"));
  CHECK(contains(message_of(ErrorKind::kFault,
                            [&] {
                              softcap(kCpu, 30.0f, HostTensor(DType::kBF16, {2, 5}));
                            }),
                 "softcap: logits is bf16 (2, 5)"));
}

}  // namespace
}  // namespace invar::ops
