#include "layers/vocab_embedding.h"

#include <algorithm>

#include "config/units.h"
#include "ops/elementwise.h"
#include "parallel/unit_partition.h"

namespace invar {

VocabTable add_vocab_table(const LayerSetup& setup, const std::string& name, int64_t vocab_size, int64_t hidden_size,
                           int64_t frozen_token) {
  const UnitCut units = setup.cut(vocab_units(vocab_size));
  const Range mine = units.mine();
  VocabTable vocabulary;
  vocabulary.rows = {mine.begin * kVocabUnit, mine.end * kVocabUnit};
  vocabulary.vocab_size = vocab_size;
  vocabulary.widest = units.widest() * kVocabUnit;
  vocabulary.dim = units.dim(kVocabUnit);

  Parameter parameter;
  parameter.name = name;
  parameter.shape = {vocab_size, hidden_size};
  parameter.zero_row = frozen_token;
  const Range real = intersect(vocabulary.rows, {0, vocab_size});
  if (!real.empty()) parameter.runs = {{real, 0}};
  Weight weight;
  weight.name = name;
  weight.rows = vocabulary.rows.size();
  weight.cols = hidden_size;
  weight.parameters = {std::move(parameter)};
  vocabulary.weight = setup.table.add(std::move(weight));
  return vocabulary;
}

void VocabEmbedding::forward(const LayerContext& ctx, const Tensor& tokens, const Tensor& h) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor looked_up = ctx.scratch.allocate("embedding", ctx.activation, {ctx.region.tokens(), h.dim(1)});
  ops::embedding_forward(ctx.stream, lookup_, tokens, ctx.forward_weight(table_.weight).value(), table_.rows,
                         looked_up);
  ops::copy(ctx.stream, ctx.region.reduce(ctx.stream, ctx.scratch, looked_up, ctx.activation), h);
}

void VocabEmbedding::backward(const LayerContext& ctx, const Tensor& tokens, const Tensor& d_h) const {
  const ArenaScope scope(ctx.scratch);
  const Tensor d_all = ctx.region.gather(ctx.stream, ctx.scratch, d_h);
  ctx.gradients.add_lookups(ctx, use_, [&](Range part, const ops::SampleSums& sums) {
    ops::embedding_backward(ctx.stream, lookup_, tokens.rows(part.begin, part.end), d_all.rows(part.begin, part.end),
                            table_.rows, sums);
  });
  ctx.gradients.done(use_.id);
}

}  // namespace invar
