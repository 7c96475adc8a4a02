#include "ops/elementwise.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/integer.h"
#include "ops/cpu/element.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::load;
using cpu::store;

void expect_same_shape(std::string_view op, const Tensor& a, const Tensor& b) {
  INVAR_CHECK(std::ranges::equal(a.shape(), b.shape()), "{}: {} and {} differ in shape", op, a.describe(),
              b.describe());
}

void expect_sum(std::string_view op, const Tensor& x, const Tensor& total) {
  INVAR_CHECK(x.dtype() == DType::kF32, "{}: x is {}, expected f32", op, x.describe());
  expect(op, "total", total, DType::kF64, {1});
}

template <class From, class To>
void copy_cpu(int threads, int64_t n, const From* from, To* to) {
  cpu::parallel_for(threads, n, 1, [=](Range range) {
    if constexpr (std::is_same_v<From, To>) {
      std::copy(from + range.begin, from + range.end, to + range.begin);
    } else {
#pragma omp simd
      for (int64_t i = range.begin; i < range.end; ++i) store(to[i], load(from[i]));
    }
  });
}

template <class A, class B, class Out>
void add_cpu(int threads, int64_t n, const A* a, const B* b, Out* out) {
  cpu::parallel_for(threads, n, 1, [=](Range range) {
#pragma omp simd
    for (int64_t i = range.begin; i < range.end; ++i) store(out[i], load(a[i]) + load(b[i]));
  });
}

// Sum of the n terms of accumulate(i, sum) = sum + term i in fp64. The order depends on n alone: threads share whole
// blocks, whose sums are joined in ascending order.
template <class Accumulate>
double block_sum(int threads, int64_t n, Accumulate accumulate) {
  std::vector<double> sums(static_cast<size_t>(ceil_div(n, kSumBlock)));
  cpu::parallel_for(threads, std::ssize(sums), kSumBlock, [&](Range blocks) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      sums[static_cast<size_t>(block)] =
          cpu::lane_block_sum<double>(block * kSumBlock, std::min(n, (block + 1) * kSumBlock), accumulate);
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The terms x².
auto squares_of(const float* x) {
  return [=](int64_t i, double sum) { return sum + static_cast<double>(x[i]) * static_cast<double>(x[i]); };
}

}  // namespace

void zero(const Stream& stream, const Tensor& x) {
  if (!has_work("zero", stream, {&x}) || x.empty()) return;
  if (on_cuda(stream)) return cuda::zero(stream, x);
  auto* bytes = static_cast<std::byte*>(x.raw());
  cpu::parallel_for(stream.threads(), x.bytes(), 1,
                    [=](Range range) { std::memset(bytes + range.begin, 0, static_cast<size_t>(range.size())); });
}

void copy(const Stream& stream, const Tensor& from, const Tensor& to) {
  constexpr auto kOp = "copy";
  expect_same_shape(kOp, from, to);
  if (!has_work(kOp, stream, {&from, &to})) return;
  if (on_cuda(stream)) return cuda::copy(stream, from, to);
  visit_float(kOp, from.dtype(), [&]<class From>(std::type_identity<From>) {
    visit_float(kOp, to.dtype(), [&]<class To>(std::type_identity<To>) {
      copy_cpu(stream.threads(), from.numel(), from.data<From>(), to.data<To>());
    });
  });
}

void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to) {
  constexpr auto kOp = "copy_heads";
  expect_heads(kOp, "from", from);
  expect_heads_like(kOp, "to", to, from);
  if (!has_work(kOp, stream, {&from.buffer, &to.buffer})) return;
  if (on_cuda(stream)) return cuda::copy_heads(stream, from, to);
  visit_float(kOp, from.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    const int64_t width = from.heads_per_group * from.head_dim;
    cpu::parallel_for(stream.threads(), from.tokens(), from.groups * width, [&](Range tokens) {
      for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        for (int64_t head = 0; head < from.heads(); head += from.heads_per_group) {
          std::copy_n(from.buffer.data<T>() + from.index(token, head), width,
                      to.buffer.data<T>() + to.index(token, head));
        }
      }
    });
  });
}

void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr auto kOp = "add";
  expect_same_shape(kOp, a, b);
  expect_same_shape(kOp, a, out);
  if (!has_work(kOp, stream, {&a, &b, &out})) return;
  if (on_cuda(stream)) return cuda::add(stream, a, b, out);
  visit_float(kOp, a.dtype(), [&]<class A>(std::type_identity<A>) {
    visit_float(kOp, b.dtype(), [&]<class B>(std::type_identity<B>) {
      visit_float(kOp, out.dtype(), [&]<class Out>(std::type_identity<Out>) {
        add_cpu(stream.threads(), a.numel(), a.data<A>(), b.data<B>(), out.data<Out>());
      });
    });
  });
}

void maximum(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr auto kOp = "maximum";
  for (const Tensor* x : {&a, &b}) {
    expect_same_shape(kOp, *x, out);
    INVAR_CHECK(x->dtype() == DType::kF32 && out.dtype() == DType::kF32, "{}: {} is not f32", kOp, x->describe());
  }
  if (!has_work(kOp, stream, {&a, &b, &out})) return;
  if (on_cuda(stream)) return cuda::maximum(stream, a, b, out);
  std::ranges::transform(a.span<float>(), b.span<float>(), out.data<float>(),
                         [](float x, float y) { return std::max(x, y); });
}

void scale_by(const Stream& stream, const Tensor& factor, const Tensor& x) {
  constexpr auto kOp = "scale_by";
  expect(kOp, "factor", factor, x.dtype(), {1});
  if (!has_work(kOp, stream, {&factor, &x})) return;
  if (on_cuda(stream)) return cuda::scale_by(stream, factor, x);
  visit_float(kOp, x.dtype(), [&]<class T>(std::type_identity<T>) {
    T* out = x.data<T>();
    const float by = load(factor.data<T>()[0]);
    cpu::parallel_for(stream.threads(), x.numel(), 1, [=](Range range) {
#pragma omp simd
      for (int64_t i = range.begin; i < range.end; ++i) store(out[i], load(out[i]) * by);
    });
  });
}

void add_sum_of_squares(const Stream& stream, const Tensor& x, const Tensor& total) {
  constexpr auto kOp = "add_sum_of_squares";
  expect_sum(kOp, x, total);
  if (!has_work(kOp, stream, {&x, &total})) return;
  if (on_cuda(stream)) return cuda::add_sum_of_squares(stream, x, total);
  *total.data<double>() += block_sum(stream.threads(), x.numel(), squares_of(x.data<float>()));
}

void add_sum(const Stream& stream, const Tensor& x, const Tensor& total) {
  constexpr auto kOp = "add_sum";
  expect_sum(kOp, x, total);
  if (!has_work(kOp, stream, {&x, &total})) return;
  if (on_cuda(stream)) return cuda::add_sum(stream, x, total);
  *total.data<double>() += block_sum(stream.threads(), x.numel(), [x = x.data<float>()](int64_t i, double sum) {
    return sum + static_cast<double>(x[i]);
  });
}

void row_squares(const Stream& stream, const Tensor& x, std::span<const RowBlock> blocks, const Tensor& out) {
  constexpr auto kOp = "row_squares";
  INVAR_CHECK(x.dims() == 1, "{}: x is {}, expected f32 of 1 dim", kOp, x.describe());
  const int64_t n = x.dim(0);
  expect(kOp, "x", x, DType::kF32, {n});
  int64_t rows = 0;
  for (const RowBlock& block : blocks) {
    INVAR_CHECK(block.begin >= 0 && block.rows >= 0 && block.columns >= 0 && block.end() <= n,
                "{}: {} rows of {} from element {} of {}", kOp, block.rows, block.columns, block.begin, n);
    rows += block.rows;
  }
  expect(kOp, "out", out, DType::kF64, {rows});
  if (!has_work(kOp, stream, {&x, &out})) return;
  if (on_cuda(stream)) return cuda::row_squares(stream, x, blocks, out);
  auto* sums = out.data<double>();
  for (const RowBlock& block : blocks) {
    const auto* elements = x.data<float>() + block.begin;
    cpu::parallel_for(stream.threads(), block.rows, block.columns, [=](Range range) {
      for (int64_t row = range.begin; row < range.end; ++row) {
        sums[row] = block_sum(1, block.columns, squares_of(elements + row * block.columns));
      }
    });
    sums += block.rows;
  }
}

void exact_sum(const Stream& stream, const Tensor& x, const Tensor& digits) {
  constexpr auto kOp = "exact_sum";
  INVAR_CHECK(x.dims() == 1, "{}: x is {}, expected f64 of 1 dim", kOp, x.describe());
  expect(kOp, "x", x, DType::kF64, {x.dim(0)});
  expect(kOp, "digits", digits, DType::kI64, {ExactSum::kDigits});
  if (!has_work(kOp, stream, {&x, &digits})) return;
  if (on_cuda(stream)) return cuda::exact_sum(stream, x, digits);
  ExactSum sum;
  for (const double term : x.span<double>()) sum.add(term);
  std::ranges::copy(sum.digits(), digits.data<int64_t>());
}

}  // namespace invar::ops
