#include "ops/elementwise.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/element.h"
#include "ops/cpu/parallel.h"
#include "ops/dispatch.h"

namespace invar::ops {

namespace {

using cpu::load;
using cpu::store;

void expect_same_shape(std::string_view op, const Tensor& a, const Tensor& b) {
  INVAR_CHECK(std::ranges::equal(a.shape(), b.shape()), "{}: {} and {} differ in shape", op, a.describe(),
              b.describe());
}

void expect_f32(std::string_view op, const Tensor& x) {
  INVAR_CHECK(x.dtype() == DType::kF32, "{}: x is {}, expected f32", op, x.describe());
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

template <class T>
void scale_cpu(int threads, int64_t n, T* x, float factor) {
  cpu::parallel_for(threads, n, 1, [=](Range range) {
#pragma omp simd
    for (int64_t i = range.begin; i < range.end; ++i) store(x[i], load(x[i]) * factor);
  });
}

}  // namespace

void zero(const Stream& stream, const Tensor& x) {
  if (!runs_on_cpu("zero", stream, {&x}) || x.empty()) return;
  auto* bytes = static_cast<std::byte*>(x.raw());
  cpu::parallel_for(stream.threads(), x.bytes(), 1,
                    [=](Range range) { std::memset(bytes + range.begin, 0, static_cast<size_t>(range.size())); });
}

void copy(const Stream& stream, const Tensor& from, const Tensor& to) {
  constexpr auto kOp = "copy";
  expect_same_shape(kOp, from, to);
  if (!runs_on_cpu(kOp, stream, {&from, &to})) return;
  visit_float(kOp, from.dtype(), [&]<class From>(std::type_identity<From>) {
    visit_float(kOp, to.dtype(), [&]<class To>(std::type_identity<To>) {
      copy_cpu(stream.threads(), from.numel(), from.data<From>(), to.data<To>());
    });
  });
}

void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr auto kOp = "add";
  expect_same_shape(kOp, a, b);
  expect_same_shape(kOp, a, out);
  if (!runs_on_cpu(kOp, stream, {&a, &b, &out})) return;
  visit_float(kOp, a.dtype(), [&]<class A>(std::type_identity<A>) {
    visit_float(kOp, b.dtype(), [&]<class B>(std::type_identity<B>) {
      visit_float(kOp, out.dtype(), [&]<class Out>(std::type_identity<Out>) {
        add_cpu(stream.threads(), a.numel(), a.data<A>(), b.data<B>(), out.data<Out>());
      });
    });
  });
}

void scale(const Stream& stream, const Tensor& x, float factor) {
  if (!runs_on_cpu("scale", stream, {&x})) return;
  visit_float("scale", x.dtype(),
              [&]<class T>(std::type_identity<T>) { scale_cpu(stream.threads(), x.numel(), x.data<T>(), factor); });
}

double sum_of_squares(const Stream& stream, const Tensor& x) {
  expect_f32("sum_of_squares", x);
  double total = 0;
  if (!runs_on_cpu("sum_of_squares", stream, {&x})) return total;
  for (const float value : x.span<float>()) total += static_cast<double>(value) * static_cast<double>(value);
  return total;
}

double sum(const Stream& stream, const Tensor& x) {
  expect_f32("sum", x);
  double total = 0;
  if (!runs_on_cpu("sum", stream, {&x})) return total;
  for (const float value : x.span<float>()) total += static_cast<double>(value);
  return total;
}

}  // namespace invar::ops
