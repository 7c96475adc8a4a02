#include "ops/cuda/operations.h"

// In a build without CUDA there is no stream to call these with.
namespace invar::ops::cuda {
namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorKind::kFault, "built without CUDA");
}
}  // namespace

void zero(const Stream&, const Tensor&) {
  refuse();
}
void copy(const Stream&, const Tensor&, const Tensor&) {
  refuse();
}
void copy_heads(const Stream&, const HeadView&, const HeadView&) {
  refuse();
}
void add(const Stream&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void maximum(const Stream&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void scale_by(const Stream&, const Tensor&, const Tensor&) {
  refuse();
}
void add_sum_of_squares(const Stream&, const Tensor&, const Tensor&) {
  refuse();
}
void add_sum(const Stream&, const Tensor&, const Tensor&) {
  refuse();
}
void row_squares(const Stream&, const Tensor&, std::span<const RowBlock>, const Tensor&) {
  refuse();
}
void exact_sum(const Stream&, const Tensor&, const Tensor&) {
  refuse();
}
void adamw_update(const Stream&, const AdamWParams&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  const Tensor&) {
  refuse();
}
void softcap(const Stream&, float, const Tensor&) {
  refuse();
}
void logits_statistics(const Stream&, const Tensor&, Range, const Tensor&, Range, int64_t, const Tensor&, const Tensor&,
                       const Tensor&) {
  refuse();
}
void rescale_sum_exp(const Stream&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void token_losses(const Stream&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void logits_gradient(const Stream&, const Tensor&, const Tensor&, Range, int64_t, const Tensor&, const Tensor&, float,
                     float, const Tensor&) {
  refuse();
}
void embedding_forward(const Stream&, const LookupParams&, const Tensor&, const Tensor&, Range, const Tensor&) {
  refuse();
}
void embedding_backward(const Stream&, const LookupParams&, const Tensor&, const Tensor&, Range, const SampleSums&) {
  refuse();
}
void column_embedding_forward(const Stream&, const LookupParams&, const Tensor&, const Tensor&, int64_t,
                              const Tensor&) {
  refuse();
}
void column_embedding_backward(const Stream&, const LookupParams&, const Tensor&, const Tensor&, int64_t,
                               const SampleSums&) {
  refuse();
}
void gated_activation_forward(const Stream&, Activation, const Tensor&, int64_t, const Tensor&) {
  refuse();
}
void gated_activation_backward(const Stream&, Activation, const Tensor&, const Tensor&, int64_t, const Tensor&,
                               const Tensor&) {
  refuse();
}
void gate_forward(const Stream&, Activation, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void gate_backward(const Stream&, Activation, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                   const Tensor&) {
  refuse();
}
void matmul(const Stream&, const Tensor&, Range, Transpose, const Tensor&, Transpose, const Tensor&, float,
            const Numerics&) {
  refuse();
}
void matmul_samples(const Stream&, const Tensor&, Range, const Tensor&, const Tensor&, const Numerics&) {
  refuse();
}
bool multiply_leaves(CudaStream&, const Tensor&, const Tensor&, std::span<const LeafStep>, DType,
                     std::span<const Tensor>) {
  refuse();
}
void rms_norm_forward(const Stream&, const Tensor&, const Tensor&, float, const Tensor&, const Tensor&) {
  refuse();
}
void add_rms_norm_forward(const Stream&, const Tensor&, const Tensor&, const Tensor&, float, const Tensor&,
                          const Tensor&, const Tensor&) {
  refuse();
}
void rms_norm_backward(const Stream&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, Write, const Tensor&,
                       const Tensor&) {
  refuse();
}
void head_norm_rope_forward(const Stream&, const HeadNormRope&, const HeadView&, const HeadView&) {
  refuse();
}
void head_norm_rope_backward(const Stream&, const HeadNormRope&, const HeadView&, const HeadView&, Write,
                             const HeadView&, const Tensor&) {
  refuse();
}
void per_layer_squares(const Stream&, const PerLayerInputParams&, const Tensor&, const Tensor&,
                       std::span<const Range>) {
  refuse();
}
void per_layer_input_forward(const Stream&, const PerLayerInputParams&, const PerLayerProjection&, const Tensor&,
                             const Tensor&) {
  refuse();
}
void per_layer_dots(const Stream&, const PerLayerInputParams&, const PerLayerProjection&, const Tensor&, const Tensor&,
                    std::span<const Range>) {
  refuse();
}
void per_layer_input_backward(const Stream&, const PerLayerInputParams&, const PerLayerProjection&, const Tensor&,
                              const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  refuse();
}
void tree_sum(const Stream&, const SumProgram&, int, const Tensor&, const Tensor&) {
  refuse();
}
void random_normal(const Stream&, const NormalValues&, const Tensor&) {
  refuse();
}
void add_block_hashes(const Stream&, const Tensor&, std::span<const HashedRows>, const Tensor&, DType) {
  refuse();
}
Proofs proofs(const Stream&) {
  refuse();
}
void add_term_sums(const Stream&, const TermTable&, const Tensor&, const Tensor&, const SampleSums&) {
  refuse();
}
void add_terms(const Stream&, const Tensor&, const SampleSums&) {
  refuse();
}

std::span<const AttentionBackend* const> attention_backends() {
  return {};
}

std::string cudnn_version() {
  return "";
}

}  // namespace invar::ops::cuda
