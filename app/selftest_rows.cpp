#include "app/selftest.h"
#include "ops/cross_entropy.h"
#include "ops/gated_activation.h"
#include "ops/norm.h"

namespace invar::app {
namespace {

using Named = std::vector<std::pair<const char*, Bits>>;

Bits joined(const Bits& first, const Bits& second) {
  Bits all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

// results(rows) of all rows against those of two parts, whose elements follow one another.
std::string halves_against_whole(int64_t rows, int64_t cut, const std::function<Named(Range)>& results) {
  const Named all = results({0, rows});
  const Named first = results({0, cut});
  const Named second = results({cut, rows});
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string found = difference(joined(first[i].second, second[i].second), all[i].second);
    if (!found.empty()) return format("{}, cut at {}: {}", all[i].first, cut, found);
  }
  return "";
}

constexpr int64_t kTokens = 96, kBlock = 16;
constexpr float kEps = 1e-6f;

Named norm_results(const Stream& stream, DType dtype, int64_t width, Range tokens) {
  const auto random = [&](uint64_t seed) { return Matrix(kTokens, width, seed, 2).part(tokens, {0, width}); };
  const auto row = [&](uint64_t seed) { return Matrix(1, width, seed, 0).values; };
  Bench bench(stream);
  const int64_t n = tokens.size();
  const Tensor x = bench.matrix(dtype, random(1));
  const Tensor d_y = bench.matrix(dtype, random(2));
  const Tensor weight = bench.filled(dtype, {width}, row(3));
  const Tensor y = bench.unwritten(dtype, {n, width});
  const Tensor rstd = bench.unwritten(DType::kF32, {n});
  const Tensor d_x = bench.unwritten(dtype, {n, width});
  const Tensor d_weight = bench.matrix(DType::kF32, Matrix(n / kBlock, width));
  ops::rms_norm_forward(stream, x, weight, kEps, y, rstd);
  ops::rms_norm_backward(stream, d_y, x, weight, rstd, ops::Write::kSet, d_x, d_weight);
  return {
      {"y", bench.bits(y)}, {"rstd", bench.bits(rstd)}, {"d_x", bench.bits(d_x)}, {"d_weight", bench.bits(d_weight)}};
}

// Heads side by side, a head's rows one after another in what is returned.
Named head_norm_results(const Stream& stream, DType dtype, int64_t head_dim, Range heads) {
  constexpr int64_t kHeads = 6;
  const auto random = [&](uint64_t seed) {
    return Matrix(kTokens, kHeads * head_dim, seed, 2)
        .part({0, kTokens}, {heads.begin * head_dim, heads.end * head_dim});
  };
  Bench bench(stream);
  const int64_t n = heads.size();
  const auto view = [&](const Tensor& buffer) { return ops::HeadView{buffer, n, 1, head_dim, head_dim, 0}; };
  const Tensor x = bench.matrix(dtype, random(1));
  const Tensor d_y = bench.matrix(dtype, random(2));
  const Tensor weight = bench.filled(dtype, {head_dim}, Matrix(1, head_dim, 3, 0).values);
  const Tensor y = bench.unwritten(dtype, {kTokens, n * head_dim});
  const Tensor d_x = bench.unwritten(dtype, {kTokens, n * head_dim});
  const Tensor d_weight =
      bench.filled(DType::kF32, {n, kTokens / kBlock, head_dim}, Matrix(n, kTokens / kBlock * head_dim).values);
  const ops::HeadNormRope norm{weight, kEps};
  ops::head_norm_rope_forward(stream, norm, view(x), view(y));
  ops::head_norm_rope_backward(stream, norm, view(d_y), view(x), ops::Write::kSet, view(d_x), d_weight);
  const auto by_head = [&](const Tensor& tensor) {
    const Bits all = bench.bits(tensor);
    Bits bits;
    for (int64_t head = 0; head < n; ++head) {
      for (int64_t token = 0; token < kTokens; ++token) {
        const auto first = all.begin() + (token * n + head) * head_dim;
        bits.insert(bits.end(), first, first + head_dim);
      }
    }
    return bits;
  };
  return {{"y", by_head(y)}, {"d_x", by_head(d_x)}, {"d_weight", bench.bits(d_weight)}};
}

Named cross_entropy_results(const Stream& stream, DType dtype, int64_t width, Range tokens) {
  const int64_t n = tokens.size();
  const int64_t vocabulary = width - 3;
  std::vector<float> labels;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) labels.push_back(static_cast<float>(t * 31 % vocabulary));
  Bench bench(stream);
  const Tensor logits = bench.matrix(DType::kF32, Matrix(kTokens, width, 1, 4).part(tokens, {0, width}));
  const Tensor label = bench.filled(DType::kI32, {n}, labels);
  const Tensor maximum = bench.unwritten(DType::kF32, {n});
  const Tensor sum = bench.unwritten(DType::kF32, {n});
  const Tensor target = bench.unwritten(DType::kF32, {n});
  const Tensor losses = bench.unwritten(DType::kF32, {n});
  const Tensor d_logits = bench.unwritten(dtype, {n, width});
  ops::softcap(stream, 5.0f, logits);
  ops::logits_statistics(stream, logits, {0, width}, label, {0, width}, vocabulary, maximum, sum, target);
  ops::token_losses(stream, label, maximum, sum, target, losses);
  ops::logits_gradient(stream, logits, label, {0, width}, vocabulary, maximum, sum, 1.0f, 5.0f, d_logits);
  return {{"logits", bench.bits(logits)},
          {"sums", bench.bits(sum)},
          {"losses", bench.bits(losses)},
          {"d_logits", bench.bits(d_logits)}};
}

Named activation_results(const Stream& stream, DType dtype, ops::Activation activation, Range tokens) {
  constexpr int64_t kBlocks = 3, kWidth = 24;
  const auto random = [&](uint64_t seed, int64_t width) {
    return Matrix(kTokens, width, seed, 3).part(tokens, {0, width});
  };
  Bench bench(stream);
  const Tensor gate_up = bench.matrix(dtype, random(1, kBlocks * 2 * kWidth));
  const Tensor d_out = bench.matrix(dtype, random(2, kBlocks * kWidth));
  const Tensor out = bench.unwritten(dtype, {tokens.size(), kBlocks * kWidth});
  const Tensor d_gate_up = bench.unwritten(dtype, {tokens.size(), kBlocks * 2 * kWidth});
  ops::gated_activation_forward(stream, activation, gate_up, kWidth, out);
  ops::gated_activation_backward(stream, activation, d_out, gate_up, kWidth, d_gate_up);
  return {{"out", bench.bits(out)}, {"d_gate_up", bench.bits(d_gate_up)}};
}

// Cuts of kTokens rows; gradients of norms want whole blocks.
std::string cut_rows(const std::vector<int64_t>& cuts, const std::function<Named(Range)>& results) {
  for (const int64_t cut : cuts) {
    std::string found = halves_against_whole(kTokens, cut, results);
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace

void check_rows(SelftestReport& report, const Stream& stream) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string_view name = name_of(dtype);
    for (const int64_t width : {320, 1001}) {
      report.check(format("RMSNorm {} of rows of {}: tokens in two", name, width), [&] {
        return cut_rows({16, 48}, [&](Range tokens) { return norm_results(stream, dtype, width, tokens); });
      });
    }
    for (const int64_t head_dim : {64, 30}) {
      report.check(format("head norm {} of heads of {}: heads in two", name, head_dim), [&] {
        const auto results = [&](Range heads) { return head_norm_results(stream, dtype, head_dim, heads); };
        std::string found = halves_against_whole(6, 1, results);
        return found.empty() ? halves_against_whole(6, 4, results) : found;
      });
    }
    for (const int64_t width : {640, 1023}) {
      report.check(format("cross entropy {} of rows of {}: tokens in two", name, width), [&] {
        return cut_rows({1, 37}, [&](Range tokens) { return cross_entropy_results(stream, dtype, width, tokens); });
      });
    }
    for (const auto& [activation, word] :
         {std::pair{ops::Activation::kSilu, "SiLU"}, {ops::Activation::kGeluTanh, "GELU"}}) {
      report.check(format("gated {} {}: tokens in two", word, name), [&, activation = activation] {
        return cut_rows({1, 37}, [&](Range tokens) { return activation_results(stream, dtype, activation, tokens); });
      });
    }
  }
}

}  // namespace invar::app
