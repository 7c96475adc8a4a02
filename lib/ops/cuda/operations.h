#pragma once

#include <span>
#include <string>

#include "core/range.h"
#include "ops/adamw.h"
#include "ops/attention.h"
#include "ops/block_hashes.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gated_activation.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/per_layer_input.h"
#include "ops/proofs.h"
#include "ops/random_normal.h"
#include "ops/term_sums.h"
#include "ops/tree_sum.h"

// Every operation on a GPU: the functions of ops/, after their checks. Operands are on the stream's device; work is
// queued and not waited for. Everything is deterministic: no atomics on floats, and the order of a sum depends on
// shapes alone where buffers are aligned to 16 bytes, as those of arenas are.
namespace invar::ops::cuda {

void zero(const Stream& stream, const Tensor& x);
void copy(const Stream& stream, const Tensor& from, const Tensor& to);
void copy_heads(const Stream& stream, const HeadView& from, const HeadView& to);
void add(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
void maximum(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& out);
void scale_by(const Stream& stream, const Tensor& factor, const Tensor& x);
void add_sum_of_squares(const Stream& stream, const Tensor& x, const Tensor& total);
void add_sum(const Stream& stream, const Tensor& x, const Tensor& total);
void row_squares(const Stream& stream, const Tensor& x, std::span<const RowBlock> blocks, const Tensor& out);
void exact_sum(const Stream& stream, const Tensor& x, const Tensor& digits);

void adamw_update(const Stream& stream, const AdamWParams& params, const Tensor& parameter, const Tensor& gradient,
                  const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& value);

void softcap(const Stream& stream, float cap, const Tensor& logits);
void logits_statistics(const Stream& stream, const Tensor& logits, Range columns, const Tensor& labels,
                       Range vocabulary, int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum,
                       const Tensor& target);
void rescale_sum_exp(const Stream& stream, const Tensor& own_maximum, const Tensor& maximum, const Tensor& sum);
void token_losses(const Stream& stream, const Tensor& labels, const Tensor& maximum, const Tensor& sum,
                  const Tensor& target, const Tensor& losses);
void logits_gradient(const Stream& stream, const Tensor& logits, const Tensor& labels, Range vocabulary,
                     int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum, float scale, float cap,
                     const Tensor& d_logits);

void embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& table,
                       Range vocabulary, const Tensor& out);
void embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens, const Tensor& d_out,
                        Range vocabulary, const SampleSums& sums);
void column_embedding_forward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                              const Tensor& table, int64_t block, const Tensor& out);
void column_embedding_backward(const Stream& stream, const LookupParams& params, const Tensor& tokens,
                               const Tensor& d_out, int64_t block, const SampleSums& sums);

void gated_activation_forward(const Stream& stream, Activation activation, const Tensor& gate_up, int64_t width,
                              const Tensor& out);
void gated_activation_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate_up,
                               int64_t width, const Tensor& d_gate_up, const Tensor& out);
void gate_forward(const Stream& stream, Activation activation, const Tensor& gate, const Tensor& value,
                  const Tensor& out);
void gate_backward(const Stream& stream, Activation activation, const Tensor& d_out, const Tensor& gate,
                   const Tensor& value, const Tensor& d_gate, const Tensor& d_value);

// Of the columns of a as stored only `columns` are there.
void matmul(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
            Transpose transpose_b, const Tensor& c, float beta, const Numerics& numerics);
// In one call of the library: not of f32 in invariant numerics; not empty.
void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms,
                    const Numerics& numerics);
// In one kernel on tensor cores of compute capability 9.0; false, and nothing is done, on other GPUs and for operands
// that it does not take.
bool multiply_leaves(CudaStream& stream, const Tensor& a, const Tensor& b, std::span<const LeafStep> steps, DType leaf,
                     std::span<const Tensor> nodes);

void rms_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, float eps, const Tensor& y,
                      const Tensor& rstd);
void add_rms_norm_forward(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& weight, float eps,
                          const Tensor& sum, const Tensor& y, const Tensor& rstd);
void rms_norm_backward(const Stream& stream, const Tensor& d_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, Write write, const Tensor& d_x, const Tensor& d_weight);  // (blocks, C)
void head_norm_rope_forward(const Stream& stream, const HeadNormRope& params, const HeadView& in, const HeadView& out);
void head_norm_rope_backward(const Stream& stream, const HeadNormRope& params, const HeadView& d_out,
                             const HeadView& in, Write write, const HeadView& d_in, const Tensor& d_weight);

void per_layer_squares(const Stream& stream, const PerLayerInputParams& params, const Tensor& projected,
                       const Tensor& squares, std::span<const Range> leaves);  // one for all, if the caller has none
void per_layer_input_forward(const Stream& stream, const PerLayerInputParams& params,
                             const PerLayerProjection& projection, const Tensor& looked_up, const Tensor& inputs);
void per_layer_dots(const Stream& stream, const PerLayerInputParams& params, const PerLayerProjection& projection,
                    const Tensor& d_inputs, const Tensor& dots, std::span<const Range> leaves);
void per_layer_input_backward(const Stream& stream, const PerLayerInputParams& params,
                              const PerLayerProjection& projection, const Tensor& d_inputs, const Tensor& dots,
                              const Tensor& d_projected, const Tensor& d_looked_up,
                              const Tensor& d_weight);  // (blocks, w)

// depth: the most values on the program's stack.
void tree_sum(const Stream& stream, const SumProgram& program, int depth, const Tensor& terms, const Tensor& out);
void add_term_sums(const Stream& stream, const TermTable& table, const Tensor& packed, const Tensor& terms,
                   const SampleSums& sums);
void add_terms(const Stream& stream, const Tensor& terms, const SampleSums& sums);

void random_normal(const Stream& stream, const NormalValues& values, const Tensor& out);
void add_block_hashes(const Stream& stream, const Tensor& values, std::span<const HashedRows> runs,
                      const Tensor& blocks, DType rounded);

Proofs proofs(const Stream& stream);

// Attention backends, best first; each refuses what it cannot do. Empty in a build without CUDA.
std::span<const AttentionBackend* const> attention_backends();
// Empty in a build without cuDNN.
std::string cudnn_version();

}  // namespace invar::ops::cuda
