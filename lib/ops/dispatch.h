#pragma once

#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "device/stream.h"
#include "ops/head_view.h"

// What every operation does before its kernel: check the operands, look at the device, pick the element type.
namespace invar::ops {

// Each throws Error{kFault}: "rms_norm_forward: rstd is f32 (5), expected f32 (4)".
void expect(std::string_view op, std::string_view name, const Tensor& tensor, DType dtype,
            std::initializer_list<int64_t> shape);
// f32 or bf16, of any shape with this many dims.
void expect_float(std::string_view op, std::string_view name, const Tensor& tensor, int dims);
// A weight's gradient as sums over runs of tokens: f32 (width), one run, or (blocks, width), `blocks` equal runs, which
// must divide the tokens. Returns it as (blocks, width).
Tensor expect_token_blocks(std::string_view op, const Tensor& d_weight, int64_t tokens, int64_t width);
enum class Groups : uint8_t { kApart, kMayCoincide };  // the latter: by a group_stride of 0, to be read only
// The heads lie inside the rows of an f32 or bf16 buffer and do not overlap.
void expect_heads(std::string_view op, std::string_view name, const HeadView& view, Groups groups = Groups::kApart);
// `view` has the tokens, heads, head_dim and dtype of `like`; strides are free.
void expect_heads_like(std::string_view op, std::string_view name, const HeadView& view, const HeadView& like,
                       Groups groups = Groups::kApart);
// The tensors that are defined are on the stream's device.
void expect_on(std::string_view op, const Stream& stream, std::initializer_list<const Tensor*> tensors);

// False on meta: nothing to do. Throws if a tensor is not on the stream's device.
bool has_work(std::string_view op, const Stream& stream, std::initializer_list<const Tensor*> tensors);

inline bool on_cuda(const Stream& stream) {
  return stream.device() == DeviceType::kCuda;
}

// f(std::type_identity<T>) with T = float or BF16.
template <class F>
void visit_float(std::string_view op, DType dtype, F&& f) {
  if (dtype == DType::kF32) return f(std::type_identity<float>{});
  INVAR_CHECK(dtype == DType::kBF16, "{}: no kernel for {}", op, name_of(dtype));
  f(std::type_identity<BF16>{});
}

}  // namespace invar::ops
