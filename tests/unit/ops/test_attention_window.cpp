#include "attention_case.h"

namespace invar::test {
namespace {

using ops::AttentionBackend;
using ops::reference_attention;

// A query and the keys it must see, as positions in the sample.
struct Sight {
  int64_t query, window, first, last;
};
const std::vector<Sight> kSights = {
    {8, 4, 5, 8}, {3, 4, 0, 3}, {511, 512, 0, 511}, {512, 512, 1, 512}, {512, 0, 0, 512}, {8, 1, 8, 8},
};
constexpr int64_t kSequence = 530, kHeadDim = 4;

// Scores of the same size for every key, so that no key vanishes beside another.
void flatten_scores(const AttentionCase& c) {
  for (const ops::HeadView* view : {&c.q, &c.k}) {
    std::vector<double> values = AttentionCase::read(*view);
    for (double& value : values) value *= 0.25;
    AttentionCase::write(*view, values);
  }
}

// The rows of `row` elements in which a and b differ.
std::vector<int64_t> differing_rows(const std::vector<double>& a, const std::vector<double>& b, size_t row) {
  std::vector<int64_t> rows;
  for (size_t r = 0; r * row < a.size(); ++r) {
    if (!std::equal(a.begin() + static_cast<std::ptrdiff_t>(r * row),
                    a.begin() + static_cast<std::ptrdiff_t>((r + 1) * row),
                    b.begin() + static_cast<std::ptrdiff_t>(r * row))) {
      rows.push_back(static_cast<int64_t>(r));
    }
  }
  return rows;
}

std::vector<int64_t> count_from(int64_t first, int64_t last) {
  std::vector<int64_t> all;
  for (int64_t i = first; i <= last; ++i) all.push_back(i);
  return all;
}

struct Forward {
  std::vector<double> out, lse;
};
Forward forward(const AttentionBackend& backend, const AttentionOperands& o) {
  HostTensor lse(DType::kF32, {o.q.tokens(), o.q.heads()});
  backend.forward(kCpu, o.params, o.q, o.k, o.v, o.out, lse);
  return {AttentionCase::read(o.out), lse.values()};
}

TEST_CASE("a query's output and lse depend on the keys of its window and on no other") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const AttentionBackend* backend : {&tiled(), &reference_attention()}) {
    for (const Sight& sight : kSights) {
      AttentionCase c({2, kSequence, 1, 1, kHeadDim, sight.window}, dtype);
      flatten_scores(c);
      const Forward before = forward(*backend, c);
      const std::vector<double> k = AttentionCase::read(c.k), v = AttentionCase::read(c.v);
      // The keys at the edges of the sight and beyond them, in the second sample.
      for (const int64_t key : {sight.first - 1, sight.first, sight.last, sight.last + 1}) {
        if (key < 0) continue;
        std::vector<double> changed_k = k, changed_v = v;
        const auto at = static_cast<size_t>((kSequence + key) * kHeadDim);
        for (size_t i = 0; i < kHeadDim; ++i) {
          changed_k[at + i] += 8.0;
          changed_v[at + i] += 1e4;
        }
        AttentionCase::write(c.v, changed_v);
        const Forward other_value = forward(*backend, c);
        AttentionCase::write(c.v, v);
        AttentionCase::write(c.k, changed_k);
        const Forward other_key = forward(*backend, c);
        AttentionCase::write(c.k, k);

        const int64_t window = sight.window == 0 ? kSequence : sight.window;
        const std::vector<int64_t> seeing =
            count_from(kSequence + key, kSequence + std::min(key + window, kSequence) - 1);
        INFO(backend->name() << " query " << sight.query << " window " << sight.window << " key " << key);
        CHECK(differing_rows(before.out, other_value.out, kHeadDim) == seeing);
        CHECK(differing_rows(before.lse, other_key.lse, 1) == seeing);
        const bool seen = std::find(seeing.begin(), seeing.end(), kSequence + sight.query) != seeing.end();
        CHECK(seen == (sight.first <= key && key <= sight.last));
      }
    }
  }
}

TEST_CASE("a query's gradient reaches the keys of its window and no other") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const AttentionBackend* backend : {&tiled(), &reference_attention()}) {
    for (const Sight& sight : kSights) {
      AttentionCase c({2, kSequence, 1, 1, kHeadDim, sight.window}, dtype);
      flatten_scores(c);
      std::vector<double> d_out = AttentionCase::read(c.d_out);
      for (size_t i = 0; i < d_out.size(); ++i) {
        if (static_cast<int64_t>(i) / kHeadDim != kSequence + sight.query) d_out[i] = 0;
      }
      AttentionCase::write(c.d_out, d_out);
      const AttentionResult result = run_attention(*backend, c);
      const std::vector<double> none(result.d_k.size(), 0.0);
      const std::vector<int64_t> seen = count_from(kSequence + sight.first, kSequence + sight.last);
      INFO(backend->name() << " query " << sight.query << " window " << sight.window);
      CHECK(differing_rows(result.d_v, none, kHeadDim) == seen);
      // The softmax of one key is 1 whatever its score: no gradient to it but rounding.
      if (seen.size() > 1) CHECK(differing_rows(result.d_k, none, kHeadDim) == seen);
    }
  }
}

TEST_CASE("tiled attention equals the reference for heads of 256 and 512") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (AttentionShape shape :
       {AttentionShape{1, 150, 1, 4, 256}, {2, 70, 2, 1, 256}, {1, 150, 1, 2, 512}, {2, 97, 1, 4, 512}}) {
    for (const int64_t window : {0, 7, 50}) {
      shape.window = window;
      AttentionCase actual(shape, dtype), expected(shape, dtype);
      const double error = worst_error(run_attention(tiled(), actual), run_attention(reference_attention(), expected));
      INFO("sequence " << shape.sequence << " head_dim " << shape.head_dim << " window " << window);
      CHECK(error < (dtype == DType::kF32 ? 1e-5 : 0x1p-6));
      CHECK(actual.unused_untouched());
      AttentionCase threaded(shape, dtype);
      run_attention(tiled(), threaded, 3);
      CHECK(same_bits(AttentionCase::read(threaded.d_k), AttentionCase::read(actual.d_k)));
      CHECK(same_bits(AttentionCase::read(threaded.out), AttentionCase::read(actual.out)));
    }
  }
}

TEST_CASE("keys and values may be the same memory") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t window = GENERATE(0, 50);
  const AttentionShape shape{2, 150, 2, 2, 64, window};
  for (const AttentionBackend* backend : {&tiled(), &reference_attention()}) {
    AttentionCase apart(shape, dtype), same(shape, dtype);
    AttentionCase::write(apart.v, AttentionCase::read(apart.k));
    const std::vector<double> unread(static_cast<size_t>(AttentionCase::count(same.v)), NAN);
    AttentionCase::write(same.v, unread);
    same.v = same.k;
    INFO(backend->name());
    CHECK(same_bits(run_attention(*backend, same), run_attention(*backend, apart)));
  }
}

}  // namespace
}  // namespace invar::test
