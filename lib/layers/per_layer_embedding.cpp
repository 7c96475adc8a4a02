#include "layers/per_layer_embedding.h"

#include <cmath>

#include "ops/elementwise.h"

namespace invar {
namespace {

// Rows [units.begin, units.end) · rows_per_unit of a tensor's P rows, once for each of `layers` such blocks.
std::vector<RowRun> runs_of(int64_t layers, int64_t units_in_all, Range units, int64_t rows_per_unit) {
  std::vector<RowRun> runs;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t first = layer * units_in_all;
    const Range global{(first + units.begin) * rows_per_unit, (first + units.end) * rows_per_unit};
    runs.push_back({global, layer * units.size() * rows_per_unit});
  }
  return runs;
}

// Of a parameter whose runs are this rank's whole weight.
Weight weight_of(Parameter parameter) {
  Weight weight;
  weight.name = parameter.name;
  for (const RowRun& run : parameter.runs) weight.rows += run.global.size();
  weight.cols = parameter.cols();
  weight.decay = parameter.shape.size() > 1;
  weight.parameters = {std::move(parameter)};
  return weight;
}

Parameter cut_on_rows(const std::string& name, const std::vector<int64_t>& shape, std::vector<RowRun> runs) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = shape;
  parameter.runs = std::move(runs);
  return parameter;
}

Parameter cut_on_columns(const std::string& name, const std::vector<int64_t>& shape, std::vector<RowRun> runs,
                         int64_t column_block) {
  Parameter parameter = cut_on_rows(name, shape, std::move(runs));
  parameter.transposed = true;
  parameter.column_block = column_block;
  return parameter;
}

// Cut by columns, whole vocabulary on every rank: lookups stay local, and so do their gradients.
WeightId add_table(const LayerSetup& setup, const PerLayerEmbeddingSpec& spec, Range units) {
  Parameter parameter = cut_on_columns(spec.table, {spec.vocab_size, spec.layers * spec.width},
                                       runs_of(spec.layers, spec.width / spec.block, units, 1), spec.block);
  parameter.zero_row = spec.frozen_token;
  Weight weight = weight_of(std::move(parameter));
  weight.lookups_only = true;
  return setup.table.add(std::move(weight));
}

ColumnParallelLinear add_projection(const LayerSetup& setup, const PerLayerEmbeddingSpec& spec, const UnitCut& cut) {
  Parameter parameter = cut_on_rows(spec.projection, {spec.layers * spec.width, spec.hidden_size},
                                    runs_of(spec.layers, spec.width / spec.block, cut.mine(), spec.block));
  return {setup.table.add(weight_of(std::move(parameter))), cut.dim(spec.block, spec.layers)};
}

WeightId add_norm(const LayerSetup& setup, const PerLayerEmbeddingSpec& spec, Range units) {
  Parameter parameter = cut_on_rows(spec.norm, {spec.width}, runs_of(1, spec.width / spec.block, units, spec.block));
  parameter.init = Init::kOnes;
  Weight weight = weight_of(std::move(parameter));
  weight.vector = VectorSum{VectorSum::Over::kSamples};
  return setup.table.add(std::move(weight));
}

ColumnParallelLinear add_gate(const LayerSetup& setup, const PerLayerGateSpec& spec, const UnitCut& cut) {
  Parameter parameter = cut_on_rows(spec.gate, {spec.width, spec.hidden_size},
                                    runs_of(1, spec.width / spec.block, cut.mine(), spec.block));
  return {setup.table.add(weight_of(std::move(parameter))), cut.dim(spec.block)};
}

RowParallelLinear add_gate_projection(const LayerSetup& setup, const PerLayerGateSpec& spec, const UnitCut& cut) {
  Parameter parameter = cut_on_columns(spec.projection, {spec.hidden_size, spec.width},
                                       runs_of(1, spec.width / spec.block, cut.mine(), spec.block), 1);
  return {setup.table.add(weight_of(std::move(parameter))), cut.dim(spec.block)};
}

}  // namespace

PerLayerEmbedding::PerLayerEmbedding(const LayerSetup& setup, const PerLayerEmbeddingSpec& spec)
    : spec_(spec),
      cut_(setup.cut(spec.width / spec.block)),
      columns_(cut_.dim(spec.block)),
      lookup_{static_cast<float>(spec.scale), spec.frozen_token},
      params_{spec.layers, spec.width, static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.hidden_size))),
              static_cast<float>(spec.norm_eps)},
      table_(add_table(setup, spec, cut_.mine())),
      projection_(add_projection(setup, spec, cut_)),
      norm_(add_norm(setup, spec, cut_.mine())) {}

Tensor PerLayerEmbedding::of_layer(const LayerContext& ctx, const Tensor& inputs, int64_t layer) {
  const int64_t tokens = ctx.region.tokens();
  return inputs.rows(layer * tokens, (layer + 1) * tokens);
}

void PerLayerEmbedding::forward(const LayerContext& ctx, const Tensor& tokens, const Tensor& x, bool with_gradient,
                                Saved& saved) const {
  const int64_t t = ctx.region.tokens();
  const int64_t width = cut_.mine().size() * spec_.block;
  saved.projected = ctx.saved.allocate("per-layer projection", ctx.activation, {t, spec_.layers * width});
  saved.squares = ctx.saved.allocate("per-layer squares", DType::kF32, {t, spec_.layers});
  saved.inputs = ctx.saved.allocate("per-layer inputs", ctx.activation, {spec_.layers * t, width});
  if (with_gradient) {
    saved.d_inputs = ctx.saved.allocate("d per-layer inputs", ctx.activation, {spec_.layers * t, width});
  }
  const ArenaScope scope(ctx.scratch);
  saved.x = projection_.forward(ctx, x, saved.projected);
  ctx.sums.sum_columns(ctx, columns_, saved.squares, [&](const Tensor& sums, std::span<const Range> parts) {
    ops::per_layer_squares(ctx.stream, params_, saved.projected, sums, parts);
  });
  const Tensor looked_up = ctx.scratch.allocate("per-layer lookup", ctx.activation, {t, spec_.layers * width});
  ops::column_embedding_forward(ctx.stream, lookup_, tokens, ctx.forward_weight(table_).value(), spec_.block,
                                looked_up);
  const HeldWeight norm = ctx.forward_weight(norm_);
  ops::per_layer_input_forward(ctx.stream, params_, {saved.projected, saved.squares, norm.value()}, looked_up,
                               saved.inputs);
}

void PerLayerEmbedding::backward(const LayerContext& ctx, const Tensor& tokens, const Tensor& x, Saved& saved,
                                 const Tensor& d_x) const {
  const ArenaScope scope(ctx.scratch);
  const int64_t t = ctx.region.tokens();
  const HeldWeight norm = ctx.backward_weight(norm_);
  const ops::PerLayerProjection projection{saved.projected, saved.squares, norm.value()};
  const Tensor dots = ctx.scratch.allocate("per-layer dots", DType::kF32, {t, spec_.layers});
  ctx.sums.sum_columns(ctx, columns_, dots, [&](const Tensor& sums, std::span<const Range> parts) {
    ops::per_layer_dots(ctx.stream, params_, projection, saved.d_inputs, sums, parts);
  });
  const Tensor d_looked_up = ctx.scratch.allocate("d per-layer lookup", ctx.activation, {t, saved.projected.dim(1)});
  // Replaces saved.projected by its gradient.
  ops::per_layer_input_backward(ctx.stream, params_, projection, saved.d_inputs, dots, saved.projected, d_looked_up,
                                ctx.gradients.vector(norm_));
  ctx.gradients.done(norm_);
  ctx.gradients.add_lookups(ctx, table_, [&](Range part, const ops::SampleSums& sums) {
    ops::column_embedding_backward(ctx.stream, lookup_, tokens.rows(part.begin, part.end),
                                   d_looked_up.rows(part.begin, part.end), spec_.block, sums);
  });
  ctx.gradients.done(table_);
  ops::add(ctx.stream, d_x, projection_.backward(ctx, ctx.keep ? saved.x : x, saved.projected), d_x);
}

PerLayerGate::PerLayerGate(const LayerSetup& setup, const PerLayerGateSpec& spec)
    : spec_(spec),
      cut_(setup.cut(spec.width / spec.block)),
      gate_(add_gate(setup, spec, cut_)),
      projection_(add_gate_projection(setup, spec, cut_)) {}

Tensor PerLayerGate::gated(const LayerContext& ctx, const Tensor& input, const Saved& saved) const {
  const Tensor product = ctx.scratch.allocate("gated input", ctx.activation, {input.dim(0), input.dim(1)});
  ops::gate_forward(ctx.stream, spec_.activation, saved.gate, input, product);
  return product;
}

Tensor PerLayerGate::forward(const LayerContext& ctx, const Tensor& h, const Tensor& input, Saved& saved) const {
  saved.gate = ctx.saved.allocate("per-layer gate", ctx.activation, {input.dim(0), input.dim(1)});
  saved.h = gate_.forward(ctx, h, saved.gate);
  return projection_.forward(ctx, gated(ctx, input, saved));
}

Tensor PerLayerGate::backward(const LayerContext& ctx, const Tensor& h, const Tensor& input, Saved& saved,
                              const Tensor& d_y, const Tensor& d_input) const {
  const Tensor d_product = ctx.scratch.allocate("d gated input", ctx.activation, {input.dim(0), input.dim(1)});
  {
    const ArenaScope scope(ctx.scratch);
    projection_.backward(
        ctx, [&] { return gated(ctx, input, saved); }, d_y, d_product);
  }
  ops::gate_backward(ctx.stream, spec_.activation, d_product, saved.gate, input, saved.gate, d_input);
  return gate_.backward(ctx, ctx.keep ? saved.h : h, saved.gate);
}

}  // namespace invar
