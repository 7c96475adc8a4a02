#pragma once

#include "core/range.h"
#include "device/stream.h"

namespace invar::ops {

// Vocab-parallel cross entropy on a chunk of n tokens, in the three local steps between which the caller reduces over
// ranks. logits f32 (n, width) are columns `vocabulary` (global token ids) of the whole row; ids at or past
// vocabulary_size are padding and count as −inf. labels i32 (n); a negative label counts as masked: its loss and
// gradient are 0.

// In place, before everything else: logits = cap · tanh(logits / cap).
void softcap(const Stream& stream, float cap, const Tensor& logits);

// Of some columns of the logits, all f32 (n), written: their maximum, −inf for padding only; sum = Σ exp(logit −
// maximum), in an order that depends on their number alone; target = the label's logit if it is among them, else 0.
void logits_statistics(const Stream& stream, const Tensor& logits, Range columns, const Tensor& labels,
                       Range vocabulary, int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum,
                       const Tensor& target);
// sum (n) · exp(own_maximum − maximum), in place: from this rank's maximum to that of all; 0 for padding only.
void rescale_sum_exp(const Stream& stream, const Tensor& own_maximum, const Tensor& maximum, const Tensor& sum);
// losses f32 (n) = log(sum) + maximum − target, 0 where masked.
void token_losses(const Stream& stream, const Tensor& labels, const Tensor& maximum, const Tensor& sum,
                  const Tensor& target, const Tensor& losses);
// d_logits (n, width), f32 or bf16 = (exp(logit − maximum)/sum − onehot) · scale, 0 where masked or padded. With a cap
// (0: none) the logits are softcapped ones, and the gradient is that of the logits before: times 1 − (logit/cap)².
// May be the logits' own buffer if f32.
void logits_gradient(const Stream& stream, const Tensor& logits, const Tensor& labels, Range vocabulary,
                     int64_t vocabulary_size, const Tensor& maximum, const Tensor& sum, float scale, float cap,
                     const Tensor& d_logits);

}  // namespace invar::ops
