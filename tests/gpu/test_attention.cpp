#include <algorithm>
#include <list>
#include <map>
#include <optional>

#include "attention_case.h"
#include "device_tensor.h"
#include "ops/cuda/attention_backends.h"
#include "ops/cuda/operations.h"

namespace invar::test {
namespace {

using ops::AttentionBackend;
using ops::reference_attention;

constexpr int64_t kAligned = 8;  // unused elements of a row that leave the heads aligned to 16 bytes

// Documents that are short, of one token, and across tiles of 64, beginning on the last token of one and ending on the
// first of another.
HostTensor document_starts(const AttentionShape& shape) {
  std::vector<double> starts;
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    const std::vector<int64_t> lengths = {5 + sample, 1, 57 - sample, 66, 1, 1, 17, 150};
    int64_t start = 0;
    for (size_t i = 0; start < shape.sequence; ++i) {
      const int64_t end = std::min(shape.sequence, start + lengths[i % lengths.size()]);
      starts.insert(starts.end(), static_cast<size_t>(end - start), static_cast<double>(start));
      start = end;
    }
  }
  return HostTensor(DType::kI32, {std::ssize(starts)}, starts);
}

// What part of a case gives on the GPU. The results are in the case's own memory too.
AttentionResult run_on_gpu(const AttentionBackend& backend, const AttentionCase& whole, const AttentionOperands& part) {
  std::list<DeviceTensor> copies;
  for (const Tensor& buffer : whole.buffers()) copies.emplace_back(buffer);
  const auto on_gpu = [&](ops::HeadView view) {
    auto copy = copies.begin();
    for (const Tensor& buffer : whole.buffers()) {
      const auto distance = static_cast<std::byte*>(view.buffer.raw()) - static_cast<std::byte*>(buffer.raw());
      if (0 <= distance && distance < std::max<int64_t>(1, buffer.bytes())) {
        view.buffer = Tensor(static_cast<std::byte*>(copy->tensor().raw()) + distance, view.buffer.dtype(),
                             DeviceType::kCuda, view.buffer.shape());
        return view;
      }
      ++copy;
    }
    FAIL("a view of no buffer");
    return view;
  };
  AttentionOperands o = part;
  for (ops::HeadView* view : o.views()) *view = on_gpu(*view);
  std::optional<DeviceTensor> starts;
  if (o.params.document_starts.defined()) o.params.document_starts = starts.emplace(part.params.document_starts);
  const DeviceTensor lse(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  const DeviceTensor delta(HostTensor(DType::kF32, {o.q.tokens(), o.q.heads()}));
  backend.forward(gpu(), o.params, o.q, o.k, o.v, o.out, lse);
  backend.backward(gpu(), o.params, o.q, o.k, o.v, o.out, lse, o.d_out, delta, o.d_q, o.d_k, o.d_v);
  auto copy = copies.begin();
  for (const Tensor& buffer : whole.buffers()) copy_across(gpu(), *copy++, buffer);
  synchronize(gpu());
  return {AttentionCase::read(part.out), lse.host().values(), AttentionCase::read(part.d_q),
          AttentionCase::read(part.d_k), AttentionCase::read(part.d_v)};
}

// The same inputs in another dtype that holds them.
void copy_inputs(const AttentionCase& from, const AttentionCase& to) {
  AttentionCase::write(to.q, AttentionCase::read(from.q));
  AttentionCase::write(to.k, AttentionCase::read(from.k));
  AttentionCase::write(to.v, AttentionCase::read(from.v));
  AttentionCase::write(to.d_out, AttentionCase::read(from.d_out));
}

// On the inputs of the case as they were rounded to its dtype: in fp64, or in fp32 by the CPU's backend.
AttentionResult expected_result(const AttentionCase& c, const AttentionShape& shape, bool in_fp64 = true) {
  AttentionCase copy(shape, in_fp64 ? DType::kF64 : DType::kF32);
  copy_inputs(c, copy);
  copy.params = c.params;
  return run_attention(in_fp64 ? reference_attention() : tiled(), copy, 16);
}

double norm(const std::vector<double>& values) {
  return std::sqrt(dot(values, values));
}

std::vector<double> difference(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

struct Errors {
  double out, lse, d_q, d_k, d_v;
};

// Relative norms. d_q and d_k are sums of P ∘ (dP − delta), where a rounding of out leaves an error of dP's size: with
// few keys to see, or one, it is all there is. So they are measured against d_v where that is larger.
Errors errors_of(const AttentionResult& actual, const AttentionResult& expected) {
  const auto of_scores = [&](const std::vector<double>& a, const std::vector<double>& e) {
    return norm(difference(a, e)) / std::max(norm(e), norm(expected.d_v));
  };
  return {relative_norm(actual.out, expected.out), relative_norm(actual.lse, expected.lse),
          of_scores(actual.d_q, expected.d_q), of_scores(actual.d_k, expected.d_k),
          relative_norm(actual.d_v, expected.d_v)};
}

// fp32 throughout; or bf16 operands and results, and with tensor cores bf16 probabilities, of relative error 2^-9 at
// most each.
struct Band {
  double out, lse, gradient;
};
Band band_of(DType dtype) {
  return dtype == DType::kF32 ? Band{2e-6, 2e-6, 3e-6} : Band{3e-3, 2e-6, 6e-3};
}

void check_errors(const AttentionResult& actual, const AttentionResult& expected, const Band& band) {
  const Errors errors = errors_of(actual, expected);
  CHECK(errors.out < band.out);
  CHECK(errors.lse < band.lse);
  CHECK(errors.d_q < band.gradient);
  CHECK(errors.d_k < band.gradient);
  CHECK(errors.d_v < band.gradient);
}

std::string describe(const AttentionShape& s, DType dtype, bool documents) {
  return format("{} samples of {}, {} groups of {} heads of {}, window {}, {}{}", s.samples, s.sequence, s.groups,
                s.heads_per_group, s.head_dim, s.window, name_of(dtype), documents ? ", documents" : "");
}

// Every backend that takes the case, against fp64; counts the cases of each.
void check_backends(const AttentionShape& shape, DType dtype, bool documents, std::map<std::string, int>& runs) {
  INFO(describe(shape, dtype, documents));
  const HostTensor starts = document_starts(shape);
  std::optional<AttentionResult> expected;
  for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
    AttentionCase c(shape, dtype, 1, kAligned);
    if (documents) c.params.document_starts = starts;
    if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
    INFO(backend->name());
    if (!expected) expected = expected_result(c, shape);
    check_errors(run_on_gpu(*backend, c, c), *expected, band_of(dtype));
    CHECK(c.unused_untouched());
    ++runs[backend->name()];
  }
}

TEST_CASE("each backend agrees with fp64, forward and backward") {
  const std::vector<int64_t> sequences = {1, 2, 31, 64, 100, 257, 512};
  const std::vector<int64_t> windows = {0, 7, 300, 64, 1};
  const std::vector<int64_t> ratios = {1, 2, 3, 8};
  std::map<std::string, int> runs;
  int cases = 0;
  int tiled_cases = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    size_t i = 0;
    for (const int64_t head_dim : {5, 16, 33, 64, 80, 128, 256, 320, 512}) {
      for (const int64_t sequence : sequences) {
        if (sequence * head_dim > 512 * 128) continue;
        const AttentionShape shape{1 + static_cast<int64_t>(i / 4 % 3),
                                   sequence,
                                   1 + static_cast<int64_t>(i / 2 % 2),
                                   ratios[i % 4],
                                   head_dim,
                                   windows[i % 5]};
        check_backends(shape, dtype, i % 3 == 1, runs);
        ++i, ++cases;
        tiled_cases += dtype == DType::kBF16 && head_dim % 16 == 0;
      }
    }
  }
  CHECK(runs["plain"] == cases);
  CHECK(runs["tiled"] == tiled_cases);
}

TEST_CASE("windows and documents of every size, at 3 samples") {
  std::map<std::string, int> runs;
  int cases = 0;
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t window : {0, 1, 7, 64, 65, 66, 300}) {
      for (const bool documents : {false, true}) {
        check_backends({3, 257, 2, 2, head_dim, window}, DType::kBF16, documents, runs);
        ++cases;
      }
    }
  }
  CHECK(runs["plain"] == cases);
  CHECK(runs["tiled"] == cases);
}

TEST_CASE("a long sequence agrees with the CPU") {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    // The last has more blocks of keys than the tiled backend gives to each query head.
    for (const AttentionShape& shape : {AttentionShape{1, 2100, 1, 4, 128, 0}, AttentionShape{1, 2100, 1, 4, 128, 1000},
                                        AttentionShape{1, 4112, 1, 2, 512, 200}}) {
      std::optional<AttentionResult> expected;
      for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
        AttentionCase c(shape, dtype, 1, kAligned);
        if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
        INFO(backend->name() << " " << describe(shape, dtype, false));
        if (!expected) expected = expected_result(c, shape, false);
        check_errors(run_on_gpu(*backend, c, c), *expected, band_of(dtype));
      }
    }
  }
}

TEST_CASE("a window or a document that is off by one is outside the band") {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const AttentionShape shape{2, 200, 1, 2, 64, 64};
    for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
      AttentionCase c(shape, dtype, 1, kAligned);
      if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
      INFO(backend->name());
      const auto check_outside = [&](const AttentionResult& expected) {
        const Errors errors = errors_of(run_on_gpu(*backend, c, c), expected);
        const Band band = band_of(dtype);
        CHECK(errors.out > 2 * band.out);
        CHECK(errors.d_q > 2 * band.gradient);
        CHECK(errors.d_k > 2 * band.gradient);
        CHECK(errors.d_v > 2 * band.gradient);
      };
      const AttentionResult of_window = expected_result(c, shape);
      for (const int64_t window : {63, 65}) {
        c.params.window = window;
        check_outside(of_window);
      }
      c.params.window = 0;
      HostTensor starts = document_starts(shape);
      c.params.document_starts = starts;
      if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
      const AttentionResult of_documents = expected_result(c, shape);
      // The document of tokens 63 to 128 loses the first of them.
      for (size_t token = 64; token <= 128; ++token) starts.set(token, 64);
      check_outside(of_documents);
    }
  }
}

// Columns [begin, end) of rows.
std::vector<double> columns(const std::vector<double>& values, int64_t row, int64_t begin, int64_t end) {
  std::vector<double> part;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % row;
    if (begin <= column && column < end) part.push_back(values[i]);
  }
  return part;
}

void check_parts(const AttentionBackend& backend, const AttentionShape& shape, DType dtype, bool documents) {
  const HostTensor starts = document_starts(shape);
  const auto run = [&](auto part_of) {
    AttentionCase c(shape, dtype, 1, kAligned);
    if (documents) c.params.document_starts = starts;
    return run_on_gpu(backend, c, part_of(c));
  };
  const AttentionResult all = run([](const AttentionCase& c) -> const AttentionOperands& { return c; });
  CHECK(same_bits(run([](const AttentionCase& c) -> const AttentionOperands& { return c; }), all));

  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    const AttentionResult part = run([&](const AttentionCase& c) {
      AttentionOperands o = c.sample(sample);
      if (documents)
        o.params.document_starts = starts.tensor().rows(sample * shape.sequence, (sample + 1) * shape.sequence);
      return o;
    });
    const auto rows = [&](const std::vector<double>& values) {
      const auto size = std::ssize(values) / shape.samples;
      return std::vector<double>(values.begin() + sample * size, values.begin() + (sample + 1) * size);
    };
    CHECK(same_bits(part, {rows(all.out), rows(all.lse), rows(all.d_q), rows(all.d_k), rows(all.d_v)}));
  }
  const int64_t heads = shape.groups * shape.heads_per_group;
  for (int64_t group = 0; group < shape.groups; ++group) {
    const AttentionResult part = run([&](const AttentionCase& c) { return c.group(group); });
    const auto of_group = [&](const std::vector<double>& values, int64_t row) {
      return columns(values, row, group * row / shape.groups, (group + 1) * row / shape.groups);
    };
    const int64_t q_row = heads * shape.head_dim;
    const int64_t k_row = shape.groups * shape.head_dim;
    CHECK(same_bits(part, {of_group(all.out, q_row), of_group(all.lse, heads), of_group(all.d_q, q_row),
                           of_group(all.d_k, k_row), of_group(all.d_v, k_row)}));
  }
}

TEST_CASE("bits are the same again, and for a sample or a group alone") {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      for (const bool documents : {false, true}) {
        const AttentionShape shape{3, 140, 2, 2, head_dim, documents ? 0 : 50};
        for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
          AttentionCase any(shape, dtype, 1, kAligned);
          const HostTensor starts = document_starts(shape);
          if (documents) any.params.document_starts = starts;
          if (!backend->refusal(any.params, any.q, any.k).empty()) continue;
          INFO(backend->name() << " " << describe(shape, dtype, documents));
          check_parts(*backend, shape, dtype, documents);
        }
      }
    }
  }
}

TEST_CASE("a backward pass in parts has the bits of its samples and groups alone") {
  constexpr int64_t kTermBytes = 256 * 8 * 2 * 512 * sizeof(float);  // of d_k and d_v, of a sample's group
  static_assert(ops::cuda::kTiledTermBytes == 8 * kTermBytes, "ten make two parts");
  const auto [samples, groups] = GENERATE(values<std::pair<int64_t, int64_t>>({{10, 1}, {2, 10}}));
  const AttentionShape shape{samples, 256, groups, 8, 512, 0};
  const HostTensor starts = document_starts(shape);
  AttentionCase c(shape, DType::kBF16, 1, kAligned);
  c.params.document_starts = starts;
  const auto backends = ops::cuda::attention_backends();
  const AttentionBackend& tiled = **std::ranges::find(backends, "tiled", [](const auto* b) { return b->name(); });
  const AttentionResult all = run_on_gpu(tiled, c, c);
  const auto parts_of = [](const std::vector<double>& values, int64_t rows, int64_t row, int64_t of, int64_t ofs) {
    const auto size = std::ssize(values) / rows;
    std::vector<double> part(values.begin() + row * size, values.begin() + (row + 1) * size);
    return columns(part, size / 256, of * size / 256 / ofs, (of + 1) * size / 256 / ofs);
  };
  for (const int64_t index : {0, 7, 8, 9}) {  // ends and beginnings of parts
    CAPTURE(index);
    const bool of_samples = groups == 1;
    const int64_t sample = of_samples ? index : 1, group = of_samples ? 0 : index;
    AttentionOperands alone = c.sample(sample);
    alone.params.document_starts = starts.tensor().rows(sample * shape.sequence, (sample + 1) * shape.sequence);
    for (ops::HeadView* view : alone.views()) {
      view->groups = 1;
      view->offset += group * view->group_stride;
    }
    const auto part = [&](const std::vector<double>& values) {
      return parts_of(values, samples, sample, group, groups);
    };
    CHECK(same_bits(run_on_gpu(tiled, c, alone),
                    {part(all.out), part(all.lse), part(all.d_q), part(all.d_k), part(all.d_v)}));
  }
}

TEST_CASE("groups that see the same keys and values have the bits of groups with copies of them") {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      const AttentionShape shape{2, 140, 3, 2, head_dim, 50};
      for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
        AttentionCase copied(shape, dtype, 1, kAligned);
        AttentionCase shared(shape, dtype, 1, kAligned);
        const AttentionOperands same = shared.on_first_keys();
        CHECK(backend->refusal(same.params, same.q, same.k) == backend->refusal(copied.params, copied.q, copied.k));
        if (!backend->refusal(same.params, same.q, same.k).empty()) continue;
        INFO(backend->name() << " " << describe(shape, dtype, false));
        const AttentionResult apart = run_on_gpu(*backend, copied, copied);
        copied.repeat_first_keys();
        const AttentionResult result = run_on_gpu(*backend, shared, same);
        CHECK(same_bits(run_on_gpu(*backend, copied, copied), result));
        CHECK_FALSE(same_bits(apart, result));
      }
    }
  }
}

TEST_CASE("scores of any size and sign neither overflow nor vanish") {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float scale : {-40.0f, 0.0f, 40.0f, 1000.0f}) {
      const AttentionShape shape{1, 230, 1, 2, 16};
      for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
        AttentionCase c(shape, dtype, 1, kAligned);
        c.params.scale = scale;
        if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
        INFO(backend->name() << ", scale " << scale);
        const AttentionResult expected = expected_result(c, shape);
        const AttentionResult result = run_on_gpu(*backend, c, c);
        CHECK(error_of(result.lse, expected.lse) < 2e-6);
        // A score of 1e4 carries an fp32 error of 1e-3, and so does a probability.
        CHECK(error_of(result.out, expected.out) < 1e-2);
        CHECK(error_of(result.d_q, result.d_q) == 0);  // finite
        CHECK(error_of(result.d_k, result.d_k) == 0);
      }
    }
  }
}

TEST_CASE("what a backend cannot do is refused with the reason") {
  std::map<std::string, const AttentionBackend*> backends;
  for (const AttentionBackend* backend : ops::cuda::attention_backends()) backends[backend->name()] = backend;
  REQUIRE(backends.contains("plain"));
  REQUIRE(backends.contains("tiled"));
  const auto refusal = [&](const std::string& name, int64_t head_dim, DType dtype, int64_t unused) {
    const AttentionCase c({1, 4, 2, 2, head_dim}, dtype, 1, unused);
    return backends[name]->refusal(c.params, c.q, c.k);
  };
  CHECK(refusal("tiled", 512, DType::kBF16, kAligned).empty());
  CHECK(contains(refusal("tiled", 512, DType::kF32, kAligned), "it takes bf16, not f32"));
  CHECK(contains(refusal("tiled", 40, DType::kBF16, kAligned), "head_dim is 40; it takes multiples of 16"));
  CHECK(contains(refusal("tiled", 528, DType::kBF16, kAligned), "head_dim is 528"));
  CHECK(contains(refusal("tiled", 64, DType::kBF16, 3), "not all aligned to 16 bytes"));
  CHECK(refusal("plain", 64, DType::kBF16, 3).empty());
  CHECK(refusal("plain", 512, DType::kF32, 3).empty());
  CHECK(contains(refusal("plain", 513, DType::kF32, 3), "head_dim is 513; it takes up to 512"));
  CHECK(contains(refusal("plain", 64, DType::kF64, 3), "it takes f32 and bf16, not f64"));
}

TEST_CASE("no tokens are nothing to do") {
  for (const AttentionBackend* backend : ops::cuda::attention_backends()) {
    AttentionCase c({0, 4, 2, 2, 64}, DType::kBF16, 1, kAligned);
    if (!backend->refusal(c.params, c.q, c.k).empty()) continue;
    CHECK(run_on_gpu(*backend, c, c).out.empty());
  }
}

}  // namespace
}  // namespace invar::test
