#include <algorithm>

#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/device_math.cuh"
#include "ops/cuda/operations.h"
#include "ops/dispatch.h"

// A head lies in the registers of a few lanes of one warp: each lane has packs of 16 bytes of the first half and the
// packs that rotate-half RoPE pairs with them. Heads that are not whole packs, not aligned or wider than a warp holds
// take the plain kernels, one warp per head.
namespace invar::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A HeadView as rows of head_dim elements: (token, head) pairs, tokens outermost.
template <class T>
struct HeadRows {
  HeadRows(const HeadView& view, T* elements_of_view)
      : data(elements_of_view + view.offset),
        token_stride(view.token_stride()),
        group_stride(view.group_stride),
        heads_per_group(static_cast<uint32_t>(view.heads_per_group)),
        head_dim(static_cast<int>(view.head_dim)) {}

  __device__ T* row(int64_t token, uint32_t head) const {
    const uint32_t group = head / heads_per_group;
    const uint32_t head_of_group = head - group * heads_per_group;
    return data + token * token_stride + group * group_stride + static_cast<int64_t>(head_of_group) * head_dim;
  }

  T* data;
  int64_t token_stride, group_stride;
  uint32_t heads_per_group;
  int head_dim;
};

// cos is null if heads do not turn.
struct Rotation {
  explicit Rotation(const HeadNormRope& params) {
    if (params.rope == nullptr) return;
    cos = params.rope->cos.data<float>();
    sin = params.rope->sin.data<float>();
    half = params.rope->cos.dim(1);
    length = static_cast<uint32_t>(params.sequence_length);
    if (params.document_starts.defined()) starts = params.document_starts.data<int32_t>();
  }
  // Where the angles of a token begin in the tables.
  __device__ int64_t row(int64_t token) const {
    const int64_t position = token - quotient(token, length) * length;
    return (position - (starts == nullptr ? 0 : starts[token])) * half;
  }

  const float* cos = nullptr;
  const float* sin = nullptr;
  const int32_t* starts = nullptr;
  int64_t half = 0;
  uint32_t length = 1;
};

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

template <class T>
struct BackwardArgs {
  HeadRows<const T> d_out;
  HeadRows<const T> in;
  HeadRows<T> d_in;
  const T* weight;
  float* partials;  // (gridDim.x, head_dim), null without a weight
  float eps;
  Rotation rotation;
  bool add;
  int64_t rows;
  uint32_t heads;
};

struct TokenHead {
  __device__ TokenHead(int64_t row, uint32_t heads)
      : token(quotient(row, heads)), head(static_cast<uint32_t>(row - token * heads)) {}
  int64_t token;
  uint32_t head;
};

// The part of a head that a lane has: kPacks packs of each half. Lanes beyond the head have zeros.
template <class T, int kLanes, int kPacks>
struct Part {
  static constexpr int kWidth = kVectorWidth<T>;
  using Packs = Pack<T, kWidth>[2][kPacks];
  using Floats = float[2][kPacks][kWidth];

  explicit __device__ Part(int head_dim) : half(head_dim / 2), lane(static_cast<int>(threadIdx.x) % kLanes) {}

  // The first element of a pack within its half; true if the head has it.
  __device__ int at(int p) const { return (p * kLanes + lane) * kWidth; }
  __device__ bool has(int p) const { return at(p) < half; }

  __device__ void read(bool valid, const T* head, Packs& packs) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!valid || !has(p)) continue;
      packs[0][p] = load_pack<kWidth>(head + at(p));
      packs[1][p] = load_pack<kWidth>(head + half + at(p));
    }
  }

  __device__ static void unpack(const Packs& packs, Floats& values) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[h][p][i] = packs[h][p][i];
      }
    }
  }

  // values = R(angles)·values, or its transpose.
  template <bool kBack>
  __device__ void rotate(const Rotation& rotation, int64_t angles, Floats& values) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!has(p)) continue;
      const auto cos = load_pack<kWidth>(rotation.cos + angles + at(p));
      const auto sin = load_pack<kWidth>(rotation.sin + angles + at(p));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float a = values[0][p][i];
        const float b = values[1][p][i];
        const float s = kBack ? -sin[i] : sin[i];
        values[0][p][i] = fmaf(a, cos[i], -(b * s));
        values[1][p][i] = fmaf(b, cos[i], a * s);
      }
    }
  }

  int half, lane;
};

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kThreads) head_norm_forward_kernel(ForwardArgs<T> args) {
  using Mine = Part<T, kLanes, kPacks>;
  const Mine part(args.in.head_dim);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
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

// The block's row of partial sums of d_weight, over its heads: those of a warp by halving, then warps in ascending
// order.
template <int kLanes, class Mine>
__device__ void write_partials(const Mine& part, typename Mine::Floats& terms, float* out) {
  extern __shared__ __align__(16) float of_warps[];  // (kWarps, head_dim)
  const int head_dim = 2 * part.half;
  float* own = of_warps + threadIdx.x / 32 * head_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int p = 0; p < std::extent_v<typename Mine::Floats, 1>; ++p) {
#pragma unroll
      for (int i = 0; i < Mine::kWidth; ++i) {
#pragma unroll
        for (int offset = kLanes; offset < 32; offset *= 2) {
          terms[h][p][i] += __shfl_xor_sync(0xffffffffu, terms[h][p][i], offset);
        }
      }
      if (threadIdx.x % 32 < kLanes && part.has(p)) store_pack(own + h * part.half + part.at(p), terms[h][p]);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += kThreads) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp * head_dim + c];
    out[c] = sum;
  }
}

template <class T, int kLanes, int kPacks>
__global__ void __launch_bounds__(kThreads, kPacks == 1 ? 3 : 1) head_norm_backward_kernel(BackwardArgs<T> args) {
  using Mine = Part<T, kLanes, kPacks>;
  constexpr int64_t kHeads = kThreads / kLanes;  // at a time
  const Mine part(args.in.head_dim);
  const bool weighted = args.weight != nullptr;
  typename Mine::Packs weight = {};
  part.read(weighted, args.weight, weight);
  typename Mine::Floats terms = {};
  for (int64_t first = blockIdx.x * kHeads; first < args.rows; first += gridDim.x * kHeads) {
    const int64_t row = first + threadIdx.x / kLanes;
    const bool valid = row < args.rows;
    const TokenHead at(valid ? row : 0, args.heads);
    typename Mine::Packs x = {}, d_out = {}, before = {};
    part.read(valid, args.in.row(at.token, at.head), x);
    part.read(valid, args.d_out.row(at.token, at.head), d_out);
    T* d_in = args.d_in.row(at.token, at.head);
    part.read(valid && args.add, d_in, before);

    typename Mine::Floats normed;  // the gradient of the normed head
    Mine::unpack(d_out, normed);
    if (args.rotation.cos != nullptr) part.template rotate<true>(args.rotation, args.rotation.row(at.token), normed);
    float squares = 0, products = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < Mine::kWidth; ++i) {
          squares = fmaf(x[h][p][i], x[h][p][i], squares);
          products = fmaf(normed[h][p][i] * (weighted ? weight[h][p][i] : 1.0f), x[h][p][i], products);
        }
      }
    }
    squares = lane_sum<kLanes>(squares);
    const float rstd = valid ? reciprocal_rms(squares, args.in.head_dim, args.eps) : 0.0f;
    const float mean = lane_sum<kLanes>(products) * rstd / static_cast<float>(args.in.head_dim);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        forget_floats(x[h][p]);
        forget_floats(weight[h][p]);
        float values[Mine::kWidth];
#pragma unroll
        for (int i = 0; i < Mine::kWidth; ++i) {
          const float u = x[h][p][i] * rstd;
          const float g = normed[h][p][i] * (weighted ? weight[h][p][i] : 1.0f);
          values[i] = fmaf(rstd, fmaf(-u, mean, g), before[h][p][i]);
          terms[h][p][i] = fmaf(normed[h][p][i], u, terms[h][p][i]);
        }
        if (valid && part.has(p)) store_pack(d_in + h * part.half + part.at(p), values);
      }
    }
  }
  if (weighted) write_partials<kLanes>(part, terms, args.partials + static_cast<int64_t>(blockIdx.x) * 2 * part.half);
}

// f(i) for the lane's elements of the first half of a head, the larger one if head_dim is odd; `half` on lies the
// partner of i, if the head has it.
template <class F>
__device__ void for_lane(int half, F&& f) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < half; i += 32) f(i);
}

template <class T>
__global__ void __launch_bounds__(kThreads) plain_head_norm_forward_kernel(ForwardArgs<T> args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
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

// One warp per block; it sums the terms of d_weight in its row of partials.
template <class T>
__global__ void __launch_bounds__(32) plain_head_norm_backward_kernel(BackwardArgs<T> args) {
  const int head_dim = args.in.head_dim;
  const int half = (head_dim + 1) / 2;
  float* terms = args.weight == nullptr ? nullptr : args.partials + static_cast<int64_t>(blockIdx.x) * head_dim;
  const auto weight = [&](int i) { return args.weight == nullptr ? 1.0f : load(args.weight[i]); };
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const TokenHead at(row, args.heads);
    const T* x = args.in.row(at.token, at.head);
    const T* d_out = args.d_out.row(at.token, at.head);
    T* d_in = args.d_in.row(at.token, at.head);
    const int64_t angles = args.rotation.cos == nullptr ? 0 : args.rotation.row(at.token);
    // The gradients of normed elements i and, if there is one, i + half.
    const auto rotate_back = [&](int i) {
      const float a = load(d_out[i]);
      const float b = i + half < head_dim ? load(d_out[i + half]) : 0.0f;
      if (args.rotation.cos == nullptr) return make_float2(a, b);
      const float c = args.rotation.cos[angles + i], s = args.rotation.sin[angles + i];
      return make_float2(fmaf(a, c, b * s), fmaf(b, c, -(a * s)));
    };
    float squares = 0, products = 0;
    const auto add_products = [&](int i, float d_normed) {
      squares = fmaf(load(x[i]), load(x[i]), squares);
      products = fmaf(d_normed * weight(i), load(x[i]), products);
    };
    for_lane(half, [&](int i) {
      const float2 d_normed = rotate_back(i);
      add_products(i, d_normed.x);
      if (i + half < head_dim) add_products(i + half, d_normed.y);
    });
    const float rstd = reciprocal_rms(lane_sum(squares), head_dim, args.eps);
    const float mean = lane_sum(products) * rstd / static_cast<float>(head_dim);
    const auto write = [&](int i, float d_normed) {
      const float u = load(x[i]) * rstd;
      const float before = args.add ? load(d_in[i]) : 0.0f;
      store(d_in[i], fmaf(rstd, fmaf(-u, mean, d_normed * weight(i)), before));
      if (terms != nullptr) terms[i] = fmaf(d_normed, u, row == blockIdx.x ? 0.0f : terms[i]);
    };
    for_lane(half, [&](int i) {
      const float2 d_normed = rotate_back(i);
      write(i, d_normed.x);
      if (i + half < head_dim) write(i + half, d_normed.y);
    });
  }
}

// The elements of a lane's share of a head, 2 · packs · the width of a pack, must cover it. Heads in packs need views
// whose rows begin at multiples of 16 bytes; lanes = 0: the plain kernels.
struct HeadShape {
  int lanes = 0;
  int packs = 1;
};

template <class T>
HeadShape head_shape(const HeadNormRope& params, std::initializer_list<const HeadView*> views) {
  constexpr int64_t kWidth = kVectorWidth<Element<T>>;
  const int64_t head_dim = (*views.begin())->head_dim;
  bool packed = head_dim % (2 * kWidth) == 0 && head_dim <= 2 * 2 * 32 * kWidth;
  for (const HeadView* view : views) {
    const int64_t group_stride = view->groups > 1 ? view->group_stride : 0;
    packed = packed && is_aligned({view->buffer.raw()}) && view->offset % kWidth == 0 &&
             view->token_stride() % kWidth == 0 && group_stride % kWidth == 0;
  }
  packed = packed && (!params.weight.defined() || is_aligned({params.weight.raw()}));
  packed = packed && (params.rope == nullptr || is_aligned({params.rope->cos.raw(), params.rope->sin.raw()}));
  if (!packed) return {};
  HeadShape shape{1, 1};
  while (shape.lanes < 32 && shape.lanes * 2 * kWidth < head_dim) shape.lanes *= 2;
  if (shape.lanes * 2 * kWidth < head_dim) shape.packs = 2;
  return shape;
}

// f(lanes, packs) with constants.
template <class F>
void visit_shape(HeadShape shape, F&& f) {
  constexpr auto kOne = std::integral_constant<int, 1>{};
  if (shape.packs == 2) return f(std::integral_constant<int, 32>{}, std::integral_constant<int, 2>{});
  switch (shape.lanes) {
    case 1:
      return f(std::integral_constant<int, 1>{}, kOne);
    case 2:
      return f(std::integral_constant<int, 2>{}, kOne);
    case 4:
      return f(std::integral_constant<int, 4>{}, kOne);
    case 8:
      return f(std::integral_constant<int, 8>{}, kOne);
    case 16:
      return f(std::integral_constant<int, 16>{}, kOne);
    default:
      return f(std::integral_constant<int, 32>{}, kOne);
  }
}

template <class T>
void run_forward(const Stream& stream, HeadShape shape, const ForwardArgs<T>& args) {
  if (args.rows == 0) return;
  if (shape.lanes == 0) {
    const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kWarps));
    plain_head_norm_forward_kernel<<<blocks, kThreads, 0, cuda_handle(stream)>>>(args);
  } else {
    visit_shape(shape, [&](auto lanes, auto packs) {
      const auto blocks = static_cast<unsigned>(ceil_div(args.rows, kThreads / lanes()));
      head_norm_forward_kernel<T, lanes(), packs()><<<blocks, kThreads, 0, cuda_handle(stream)>>>(args);
    });
  }
  check_launch("head_norm_rope_forward");
}

template <class T>
void run_backward(const Stream& stream, HeadShape shape, BackwardArgs<T> args, float* d_weight) {
  constexpr auto kOp = "head_norm_rope_backward";
  // Enough to fill a GPU, few enough that their partial sums are little beside the heads.
  constexpr int64_t kMostBlocks = 792;
  constexpr int64_t kMostPlainBlocks = 4096;
  if (args.rows == 0) return;
  const bool plain = shape.lanes == 0;
  const int64_t blocks = plain ? std::min(args.rows, kMostPlainBlocks)
                               : std::min(ceil_div(args.rows, kThreads / shape.lanes), kMostBlocks);
  const int64_t row_bytes = args.in.head_dim * static_cast<int64_t>(sizeof(float));
  if (d_weight != nullptr) args.partials = static_cast<float*>(stream.cuda().workspace(blocks * row_bytes));
  const auto grid = static_cast<unsigned>(blocks);
  if (plain) {
    plain_head_norm_backward_kernel<<<grid, 32, 0, cuda_handle(stream)>>>(args);
  } else {
    const size_t shared = d_weight != nullptr ? static_cast<size_t>(kWarps * row_bytes) : 0;
    visit_shape(shape, [&](auto lanes, auto packs) {
      head_norm_backward_kernel<T, lanes(), packs()><<<grid, kThreads, shared, cuda_handle(stream)>>>(args);
    });
  }
  check_launch(kOp);
  if (d_weight != nullptr) add_column_sums(stream, kOp, args.partials, blocks, args.in.head_dim, d_weight);
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
    run_forward(stream, head_shape<S>(params, {&in, &out}), args);
  });
}

void head_norm_rope_backward(const Stream& stream, const HeadNormRope& params, const HeadView& d_out,
                             const HeadView& in, Write write, const HeadView& d_in, const Tensor& d_weight) {
  visit_float("head_norm_rope_backward", in.buffer.dtype(), [&]<class S>(std::type_identity<S>) {
    using T = Element<S>;
    const BackwardArgs<T> args{HeadRows<const T>(d_out, elements<S>(d_out.buffer)),
                               HeadRows<const T>(in, elements<S>(in.buffer)),
                               HeadRows<T>(d_in, elements<S>(d_in.buffer)),
                               elements<S>(params.weight),
                               nullptr,
                               params.eps,
                               Rotation(params),
                               write == Write::kAdd,
                               in.tokens() * in.heads(),
                               static_cast<uint32_t>(in.heads())};
    run_backward(stream, head_shape<S>(params, {&d_out, &in, &d_in}), args, elements<float>(d_weight));
  });
}

}  // namespace invar::ops::cuda
