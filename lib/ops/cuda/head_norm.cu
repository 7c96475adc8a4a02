#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/head_norm.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

namespace invar::ops::cuda {
namespace {

template <class T>
struct ForwardArgs {
  HeadRows<const T> in;
  HeadRows<T> out;
  const T* weight;  // null for none
  float eps;
  Rotation rotation;
  int64_t rows;  // tokens · heads
  uint32_t heads;
};

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kHeadThreads) head_norm_forward_kernel(ForwardArgs<T> args) {
  using Mine = Part<T, kLanes, kPacks>;
  const Mine part(args.in.head_dim);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kHeadThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = row < args.rows;
  const TokenHead at(valid ? row : 0, args.heads);
  typename Mine::Packs x = {};
  part.read(valid, args.in.row(at.token, at.head), x);

  float squares = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < Mine::kWidth; ++i) squares = fmaf(x[h][p][i], x[h][p][i], squares);
    }
  }
  const float rstd = reciprocal_rms(lane_sum<kLanes>(squares), args.in.head_dim, args.eps);
  if (!valid) return;
  typename Mine::Packs weight = {};
  part.read(args.weight != nullptr, args.weight, weight);
  typename Mine::Floats values;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < Mine::kWidth; ++i) {
        values[h][p][i] = x[h][p][i] * rstd * (args.weight == nullptr ? 1.0f : weight[h][p][i]);
      }
    }
  }
  if (args.rotation.cos != nullptr) part.template rotate<false>(args.rotation, args.rotation.row(at.token), values);
  T* out = args.out.row(at.token, at.head);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!part.has(p)) continue;
    store_pack(out + part.at(p), values[0][p]);
    store_pack(out + part.half + part.at(p), values[1][p]);
  }
}

template <class T>
__global__ void __launch_bounds__(kHeadThreads) plain_head_norm_forward_kernel(ForwardArgs<T> args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  if (row >= args.rows) return;
  const TokenHead at(row, args.heads);
  const T* x = args.in.row(at.token, at.head);
  T* out = args.out.row(at.token, at.head);
  const int head_dim = args.in.head_dim;
  const int half = (head_dim + 1) / 2;
  float squares = 0;
  for_lane(half, [&](int i) {
    squares = fmaf(load(x[i]), load(x[i]), squares);
    if (i + half < head_dim) squares = fmaf(load(x[i + half]), load(x[i + half]), squares);
  });
  const float rstd = reciprocal_rms(lane_sum(squares), head_dim, args.eps);
  const int64_t angles = args.rotation.cos == nullptr ? 0 : args.rotation.row(at.token);
  const auto normed = [&](int i) { return load(x[i]) * rstd * (args.weight == nullptr ? 1.0f : load(args.weight[i])); };
  for_lane(half, [&](int i) {
    const bool paired = i + half < head_dim;
    float a = normed(i);
    float b = paired ? normed(i + half) : 0.0f;
    if (args.rotation.cos != nullptr) {
      const float c = args.rotation.cos[angles + i], s = args.rotation.sin[angles + i];
      const float turned = fmaf(a, c, -(b * s));
      b = fmaf(b, c, a * s);
      a = turned;
    }
    store(out[i], a);
    if (paired) store(out[i + half], b);
  });
}

template <class T>
void run_forward(const Stream& stream, HeadShape shape, const ForwardArgs<T>& args) {
  if (args.rows == 0) return;
  if (shape.lanes == 0) {
    const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kHeadWarps));
    plain_head_norm_forward_kernel<<<blocks, kHeadThreads, 0, cuda_handle(stream)>>>(args);
  } else {
    visit_shape(shape, [&](auto lanes, auto packs) {
      const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kHeadThreads / lanes()));
      head_norm_forward_kernel<T, lanes(), packs()><<<blocks, kHeadThreads, 0, cuda_handle(stream)>>>(args);
    });
  }
  check_launch("head_norm_rope_forward");
}

}  // namespace

void head_norm_rope_forward(const Stream& stream, const HeadNormRope& params, const HeadView& in, const HeadView& out) {
  visit_float("head_norm_rope_forward", in.buffer.dtype(), [&]<class S>(std::type_identity<S>) {
    using T = Element<S>;
    const ForwardArgs<T> args{HeadRows<const T>(in, elements<S>(in.buffer)),
                              HeadRows<T>(out, elements<S>(out.buffer)),
                              elements<S>(params.weight),
                              params.eps,
                              Rotation(params),
                              in.tokens() * in.heads(),
                              static_cast<uint32_t>(in.heads())};
    run_forward(stream, head_shape<S>("head_norm_rope_forward", params, {&in, &out}), args);
  });
}

}  // namespace invar::ops::cuda
