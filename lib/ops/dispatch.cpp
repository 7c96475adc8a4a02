#include "ops/dispatch.h"

#include <algorithm>

namespace invar::ops {

namespace {
bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16;
}
}  // namespace

void expect(std::string_view op, std::string_view name, const Tensor& tensor, DType dtype,
            std::initializer_list<int64_t> shape) {
  const bool as_expected = tensor.dtype() == dtype && std::ranges::equal(tensor.shape(), shape);
  INVAR_CHECK(as_expected, "{}: {} is {}, expected {}", op, name, tensor.describe(),
              Tensor(nullptr, dtype, DeviceType::kMeta, shape).describe());
}

void expect_float(std::string_view op, std::string_view name, const Tensor& tensor, int dims) {
  INVAR_CHECK(tensor.dims() == dims && is_float(tensor.dtype()), "{}: {} is {}, expected f32 or bf16 of {} dims", op,
              name, tensor.describe(), dims);
}

Tensor expect_token_blocks(std::string_view op, const Tensor& d_weight, int64_t tokens, int64_t width) {
  const int64_t blocks = d_weight.dims() == 2 ? d_weight.dim(0) : 1;
  if (d_weight.dims() == 2) {
    expect(op, "d_weight", d_weight, DType::kF32, {blocks, width});
  } else {
    expect(op, "d_weight", d_weight, DType::kF32, {width});
  }
  INVAR_CHECK(blocks > 0 && tokens % blocks == 0, "{}: d_weight has {} blocks for {} tokens", op, blocks, tokens);
  return d_weight.view({blocks, width});
}

void expect_heads(std::string_view op, std::string_view name, const HeadView& view, Groups groups) {
  expect_float(op, name, view.buffer, 2);
  const int64_t group_width = view.heads_per_group * view.head_dim;
  INVAR_CHECK(view.groups > 0 && view.heads_per_group > 0 && view.head_dim > 0 && view.offset >= 0,
              "{}: {} has {} groups of {} heads of {} at offset {}", op, name, view.groups, view.heads_per_group,
              view.head_dim, view.offset);
  const bool same = groups == Groups::kMayCoincide && view.group_stride == 0;
  INVAR_CHECK(view.groups == 1 || same || view.group_stride >= group_width, "{}: groups of {} are {} apart but {} wide",
              op, name, view.group_stride, group_width);
  INVAR_CHECK((view.groups - 1) * view.group_stride + view.offset + group_width <= view.token_stride(),
              "{}: heads of {} end past the row of {}", op, name, view.buffer.describe());
}

void expect_heads_like(std::string_view op, std::string_view name, const HeadView& view, const HeadView& like,
                       Groups groups) {
  expect_heads(op, name, view, groups);
  INVAR_CHECK(view.tokens() == like.tokens() && view.groups == like.groups &&
                  view.heads_per_group == like.heads_per_group && view.head_dim == like.head_dim &&
                  view.buffer.dtype() == like.buffer.dtype(),
              "{}: {} holds {} groups of {} heads of {} in {}, expected {} of {} of {} in {}", op, name, view.groups,
              view.heads_per_group, view.head_dim, view.buffer.describe(), like.groups, like.heads_per_group,
              like.head_dim, like.buffer.describe());
}

void expect_on(std::string_view op, const Stream& stream, std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    INVAR_CHECK(!tensor->defined() || tensor->device() == stream.device(), "{}: {} on {}, but the stream is on {}", op,
                tensor->describe(), name_of(tensor->device()), name_of(stream.device()));
  }
}

bool has_work(std::string_view op, const Stream& stream, std::initializer_list<const Tensor*> tensors) {
  expect_on(op, stream, tensors);
  return stream.device() != DeviceType::kMeta;
}

}  // namespace invar::ops
