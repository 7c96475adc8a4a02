#include "layers/gated_mlp.h"

namespace invar {
namespace {

ColumnParallelLinear add_gate_up(const LayerSetup& setup, const GatedMlpSpec& spec, const UnitCut& cut) {
  const Range blocks = cut.mine();
  const int64_t width = spec.block_width;
  Parameter gate;
  gate.name = spec.prefix + "gate_proj.weight";
  gate.shape = {spec.intermediate_size, spec.hidden_size};
  Parameter up = gate;
  up.name = spec.prefix + "up_proj.weight";
  for (int64_t i = 0; i < blocks.size(); ++i) {
    const int64_t first = (blocks.begin + i) * width;
    gate.runs.push_back({{first, first + width}, 2 * i * width});
    up.runs.push_back({{first, first + width}, (2 * i + 1) * width});
  }
  Weight weight;
  weight.name = spec.prefix + "gate_up";
  weight.rows = 2 * blocks.size() * width;
  weight.cols = spec.hidden_size;
  weight.parameters = {std::move(gate), std::move(up)};
  return {setup.table.add(std::move(weight)), cut.dim(2 * width)};
}

RowParallelLinear add_down(const LayerSetup& setup, const GatedMlpSpec& spec, const UnitCut& cut) {
  const Range blocks = cut.mine();
  Parameter down;
  down.name = spec.prefix + "down_proj.weight";
  down.shape = {spec.hidden_size, spec.intermediate_size};
  down.transposed = true;
  down.runs = {{{blocks.begin * spec.block_width, blocks.end * spec.block_width}, 0}};
  Weight weight;
  weight.name = down.name;
  weight.rows = blocks.size() * spec.block_width;
  weight.cols = spec.hidden_size;
  weight.parameters = {std::move(down)};
  return {setup.table.add(std::move(weight)), cut.dim(spec.block_width)};
}

}  // namespace

GatedMlp::GatedMlp(const LayerSetup& setup, const GatedMlpSpec& spec)
    : spec_(spec),
      cut_(setup.cut(spec.intermediate_size / spec.block_width)),
      gate_up_(add_gate_up(setup, spec, cut_)),
      down_(add_down(setup, spec, cut_)) {}

Tensor GatedMlp::activate(const LayerContext& ctx, const Saved& saved) const {
  const Tensor act =
      ctx.scratch.allocate("ffn activation", ctx.activation, {saved.gate_up.dim(0), saved.gate_up.dim(1) / 2});
  ops::gated_activation_forward(ctx.stream, spec_.activation, saved.gate_up, spec_.block_width, act);
  return act;
}

void GatedMlp::forward_saved(const LayerContext& ctx, const Tensor& x, Saved& saved) const {
  saved.gate_up =
      ctx.saved.allocate("gate_up", ctx.activation, {ctx.region.tokens(), 2 * cut_.mine().size() * spec_.block_width});
  saved.x = gate_up_.forward(ctx, x, saved.gate_up);
}

Tensor GatedMlp::forward(const LayerContext& ctx, const Tensor& x, Saved& saved) const {
  forward_saved(ctx, x, saved);
  return down_.forward(ctx, activate(ctx, saved));
}

Tensor GatedMlp::backward(const LayerContext& ctx, const Tensor& x, Saved& saved, const Tensor& d_y) const {
  const Tensor d_act =
      ctx.scratch.allocate("d_ffn activation", ctx.activation, {saved.gate_up.dim(0), saved.gate_up.dim(1) / 2});
  const auto activation = [&] {
    const Tensor act = ctx.scratch.allocate("ffn activation", ctx.activation, {d_act.dim(0), d_act.dim(1)});
    ops::gated_activation_backward(ctx.stream, spec_.activation, d_act, saved.gate_up, spec_.block_width, saved.gate_up,
                                   act);
    return act;
  };
  {
    const ArenaScope scope(ctx.scratch);
    down_.backward(ctx, activation, d_y, d_act);
  }
  return gate_up_.backward(ctx, x, saved.gate_up);
}

}  // namespace invar
