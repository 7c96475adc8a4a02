// bench_cuda [0.6b | 1.7b | 8b | gemma] [part of a name]: the operations on a GPU at a model's shapes, each beside its
// floor: the bytes that it must move, at the speed of a device copy, or its products, at that of an 8192³ one. A timed
// repeat goes over copies of the operands that are together larger than the L2 cache; the median of the repeats is
// printed.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bench_cuda_models.h"
#include "bench_cuda_rig.h"
#include "core/error.h"
#include "core/format.h"
#include "core/integer.h"
#include "device/device.h"
#include "ops/cross_entropy.h"
#include "ops/cuda/operations.h"
#include "ops/elementwise.h"
#include "parallel/tree_collectives.h"
#include "parallel/unit_partition.h"

namespace {

using namespace invar;
using bench::AttentionShape;
using bench::bytes;
using bench::Model;
using bench::models;
using bench::products;
using bench::Run;
using bench::Work;
using ops::HeadView;
using ops::Transpose;

constexpr int64_t kLogitTokens = 2048;  // tokens of a chunk of logits

class Bench : bench::Rig {
 public:
  Bench(const Model& model, const std::string& filter) : Rig(filter), model_(model) {}

  void run() {
    std::printf("%s, %s: %ld tokens\n\n| operation | time, ms | rate | times the floor |\n|---|---|---|---|\n",
                describe_cuda_device(0).c_str(), model_.name.c_str(), model_.tokens());
    measure_floors();
    products_rows();
    for (const AttentionShape& shape : model_.attention) attention_rows(shape);
    norm_rows();
    head_rows(model_.attention.front());
    elementwise_rows();
    vocabulary_rows();
    optimizer_rows();
  }

 private:
  void measure_floors() {
    constexpr int64_t kCopied = int64_t{1} << 28, kEdge = 8192;
    const double copy = seconds_of(
        [&] { return [this, from = bf16({kCopied}), to = bf16({kCopied})] { copy_across(stream_, from, to); }; });
    bytes_per_second_ = 4.0 * static_cast<double>(kCopied) / copy;
    report("device copy", bytes(4 * kCopied), copy);
    try {
      const double product = seconds_of([&] { return matmul(false, false, kEdge, kEdge, kEdge); });
      flops_per_second_ = products(kEdge, kEdge, kEdge).flops / product;
      report("8192³ product", products(kEdge, kEdge, kEdge), product);
    } catch (const Error& error) {
      std::printf("| 8192³ product | %s | | |\n", error.what());
    }
  }

  // c (m, n) = op(a) · op(b), bf16.
  Run matmul(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k) {
    return matmul(transpose_a, transpose_b, m, n, k, DType::kBF16, 0.0f);
  }
  Run matmul(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, DType dtype, float beta) {
    const Tensor a = transpose_a ? bf16({k, m}) : bf16({m, k});
    const Tensor b = transpose_b ? bf16({n, k}) : bf16({k, n});
    const Tensor c = make(dtype, {m, n});
    return [this, a, b, c, transpose_a, transpose_b, beta] {
      ops::matmul(stream_, a, Transpose{transpose_a}, b, Transpose{transpose_b}, c, beta);
    };
  }

  // Forward, both gradients. The weight is stored as (out, in), or (in, out) if it is cut by its input.
  void site(const std::string& name, int64_t tokens, int64_t out, int64_t in, bool by_input, DType result) {
    const std::string of = "matmul " + name;
    row(of + " forward", products(tokens, out, in),
        [=, this] { return matmul(false, !by_input, tokens, out, in, result, 0.0f); });
    row(of + " dgrad", products(tokens, in, out), [=, this] { return matmul(false, by_input, tokens, in, out); });
    row(of + " wgrad", products(out, in, tokens), [=, this] {
      return by_input ? matmul(true, false, in, out, tokens, DType::kF32, 1.0f)
                      : matmul(true, false, out, in, tokens, DType::kF32, 1.0f);
    });
  }

  void products_rows() {
    const AttentionShape& heads = model_.attention.front();
    const int64_t t = model_.tokens(), c = model_.hidden, q = heads.query_heads * heads.head_dim;
    site("qkv", t, q + 2 * heads.kv_heads * heads.head_dim, c, false, DType::kBF16);
    site("attention out", t, c, q, true, DType::kBF16);
    site("gate_up", t, 2 * model_.intermediate, c, false, DType::kBF16);
    site("down", t, c, model_.intermediate, true, DType::kBF16);
    site("head", kLogitTokens, model_.vocabulary, c, false, DType::kF32);
    for (const int64_t tensor : {1, 4}) {
      const auto rows = [&](const char* gradient, int64_t m, int64_t n) {
        sample_rows(format("{}, TP={}", gradient, tensor), m, n);
      };
      rows("qkv", (q + 2 * heads.kv_heads * heads.head_dim) / tensor, c);
      rows("attention out", q / tensor, c);
      rows("gate_up", 2 * model_.intermediate / tensor, c);
      rows("down", model_.intermediate / tensor, c);
      rows("head", model_.vocabulary / tensor, c);
    }
    for (const auto& [tensor, leaves] : {std::pair(1, 4), std::pair(1, 8), std::pair(2, 4), std::pair(4, 2)}) {
      for (const DType leaf : {DType::kF32, DType::kBF16}) {
        const auto rows = [&](const char* name, int64_t k) {
          leaf_rows(format("{}, TP={}", name, tensor), leaves, leaf, t, c, k / tensor);
        };
        rows("attention out forward", q);
        rows("qkv dgrad", q + 2 * heads.kv_heads * heads.head_dim);
        rows("down forward", model_.intermediate);
        rows("gate_up dgrad", 2 * model_.intermediate);
      }
    }
  }

  // Gradients of a weight (m, n) of all samples, in fixed order, which are added to two sums in turn.
  void sample_rows(const std::string& name, int64_t m, int64_t n) {
    const int64_t samples = model_.samples, length = Model::kSequence;
    std::vector<ops::SamplePlace> places;
    for (int64_t s = 0; s < samples; ++s)
      places.push_back({s < samples / 2 ? 0 : 1, s == samples / 2, s + 1 == samples});
    const Work work = products(m, n, samples * length);
    row(format("samples {}, one by one", name), work, [=, this] {
      const Tensor a = bf16({samples * length, m}), b = bf16({samples * length, n});
      const std::vector<Tensor> sums{f32({m, n}), f32({m, n})};
      return [=, this] {
        for (int64_t s = 0; s < samples; ++s) {
          const ops::SamplePlace& place = places[static_cast<size_t>(s)];
          const Tensor& to = sums[static_cast<size_t>(place.buffer)];
          if (place.clears) ops::zero(stream_, to);
          ops::matmul(stream_, a.rows(s * length, (s + 1) * length), Transpose::kYes,
                      b.rows(s * length, (s + 1) * length), Transpose::kNo, to, 1.0f, kInvariant);
          if (place.joins > 0) ops::add(stream_, sums[0], to, sums[0]);
        }
      };
    });
    for (const int64_t most : {24, 256, 4096}) {  // MiB
      const int64_t at_once = round_up(ceil_div(m, ceil_div(samples * m * n * 4, most << 20)), int64_t{256});
      row(format("samples {}, {} MiB at once, {} rows", name, most, at_once), work, [=, this] {
        const Tensor a = bf16({samples * length, m}), b = bf16({samples * length, n});
        const std::vector<Tensor> sums{f32({m, n}), f32({m, n})};
        const Tensor all = f32({samples * std::min(at_once, m) * n});
        return [=, this] {
          for (int64_t begin = 0; begin < m; begin += at_once) {
            const Range part{begin, std::min(begin + at_once, m)};
            const Tensor terms = all.rows(0, samples * part.size() * n).view({samples, part.size(), n});
            ops::matmul_samples(stream_, a, part, b, terms, kInvariant);
            ops::add_terms(stream_, terms,
                           {places, {sums[0].rows(part.begin, part.end), sums[1].rows(part.begin, part.end)}});
          }
        };
      });
    }
  }

  // c (m, n) f32 as a sum over leaves of k in fixed order, rounded to `dtype` before: as layers make it, and a product
  // and a sum at a time.
  void leaf_rows(const std::string& name, int leaves, DType dtype, int64_t m, int64_t n, int64_t k) {
    const LeafProgram program = leaf_program(leaves, {0, leaves}, LeafKind::kAddable);
    std::vector<ops::LeafStep> steps;
    for (const Range& units : split_units(k / 16, leaves)) {
      const LeafProgram::Step& step = program.steps[steps.size()];
      steps.push_back({{units.begin * 16, units.end * 16}, step.buffer, step.accumulate, step.joins});
    }
    for (const bool one_by_one : {false, true}) {
      const std::string of = format("matmul {} of {} leaves{}{}", name, leaves, dtype == DType::kBF16 ? " in bf16" : "",
                                    one_by_one ? ", one by one" : "");
      row(of, products(m, n, k), [=, this] {
        const Tensor a = bf16({m, k}), b = bf16({k, n}), c = f32({program.buffers * m, n}), rounded = bf16({m, n});
        return [=, this] {
          std::vector<Tensor> buffers;
          for (int i = 0; i < program.buffers; ++i) buffers.push_back(c.rows(i * m, (i + 1) * m));
          const ops::LeafSpace space{buffers, dtype == DType::kBF16 ? rounded : Tensor()};
          if (one_by_one) {
            ops::matmul_leaf_by_leaf(stream_, a, b, steps, space, kInvariant);
          } else {
            ops::matmul_leaves(stream_, a, b, steps, space, {buffers.data(), 1}, kInvariant);
          }
        };
      });
    }
  }

  // As SelfAttention has them: q and k alone, v, d_q and d_v in the rows of the projection.
  struct AttentionOperands {
    HeadView q, k, v, out, d_out, d_q, d_k, d_v;
    Tensor lse, delta;
  };

  AttentionOperands attention_operands(const AttentionShape& shape) {
    const int64_t t = model_.tokens(), d = shape.head_dim, groups = shape.kv_heads;
    const int64_t per_group = shape.query_heads / groups, group_rows = (per_group + 2) * d;
    const Tensor qkv = bf16({t, groups * group_rows}), d_qkv = bf16({t, groups * group_rows});
    const auto query = [&] {
      return HeadView{bf16({t, shape.query_heads * d}), groups, per_group, d, per_group * d, 0};
    };
    const auto key = [&] { return HeadView{bf16({t, groups * d}), groups, 1, d, d, 0}; };
    const auto raw_value = [&](const Tensor& rows) {
      return HeadView{rows, groups, 1, d, group_rows, (per_group + 1) * d};
    };
    return {query(),
            key(),
            raw_value(qkv),
            query(),
            query(),
            HeadView{d_qkv, groups, per_group, d, group_rows, 0},
            key(),
            raw_value(d_qkv),
            f32({t, shape.query_heads}),
            f32({t, shape.query_heads})};
  }

  void attention_rows(const AttentionShape& shape) {
    const int64_t s = Model::kSequence, w = shape.window > 0 ? std::min(shape.window, s) : s;
    const int64_t pairs = w * (w + 1) / 2 + (s - w) * w;
    const Work forward = products(2 * model_.samples * shape.query_heads, pairs, shape.head_dim);
    const Work backward{0, 2.5 * forward.flops};
    const ops::AttentionParams params{s, 1.0f / std::sqrt(static_cast<float>(shape.head_dim)), shape.window};
    for (const ops::AttentionBackend* backend : ops::cuda::attention_backends()) {
      const std::string name = format("attention {} D={} window={}", backend->name(), shape.head_dim, shape.window);
      const auto checked = [&] {
        const AttentionOperands x = attention_operands(shape);
        const std::string refusal = backend->refusal(params, x.q, x.k);
        if (!refusal.empty()) throw Error(ErrorKind::kConfig, refusal);
        // The backward pass needs what a forward pass leaves.
        backend->forward(stream_, params, x.q, x.k, x.v, x.out, x.lse);
        return x;
      };
      row(name + " forward", forward, [&] {
        return
            [this, backend, params, x = checked()] { backend->forward(stream_, params, x.q, x.k, x.v, x.out, x.lse); };
      });
      row(name + " backward", backward, [&] {
        return [this, backend, params, x = checked()] {
          backend->backward(stream_, params, x.q, x.k, x.v, x.out, x.lse, x.d_out, x.delta, x.d_q, x.d_k, x.d_v);
        };
      });
    }
  }

  void norm_rows() {
    const int64_t t = model_.tokens(), c = model_.hidden, n = t * c;
    row("rms_norm forward", bytes(4 * n), [=, this] {
      return [this, x = bf16({t, c}), w = bf16({c}), y = bf16({t, c}), rstd = f32({t})] {
        ops::rms_norm_forward(stream_, x, w, 1e-6f, y, rstd);
      };
    });
    row("add_rms_norm forward", bytes(8 * n), [=, this] {
      return [this, a = bf16({t, c}), b = bf16({t, c}), w = bf16({c}), sum = bf16({t, c}), y = bf16({t, c}),
              rstd = f32({t})] { ops::add_rms_norm_forward(stream_, a, b, w, 1e-6f, sum, y, rstd); };
    });
    for (const auto write : {ops::Write::kSet, ops::Write::kAdd}) {
      const bool adds = write == ops::Write::kAdd;
      row(adds ? "rms_norm backward, added" : "rms_norm backward", bytes((adds ? 8 : 6) * n), [=, this] {
        return [this, write, d_y = bf16({t, c}), x = bf16({t, c}), w = bf16({c}), rstd = f32({t}), d_x = bf16({t, c}),
                d_w = f32({c})] { ops::rms_norm_backward(stream_, d_y, x, w, rstd, write, d_x, d_w); };
      });
    }
  }

  void head_rows(const AttentionShape& shape) {
    const int64_t t = model_.tokens(), d = shape.head_dim, groups = shape.kv_heads;
    const ArenaScope scope(memory_);
    const ops::RopeTable rope{f32({Model::kSequence, d / 2}), f32({Model::kSequence, d / 2})};
    for (const bool query : {true, false}) {
      const int64_t per_group = query ? shape.query_heads / groups : 1;
      const int64_t group_rows = (shape.query_heads / groups + 2) * d;
      const int64_t offset = query ? 0 : shape.query_heads / groups * d;
      const int64_t n = t * groups * per_group * d;
      const std::string name = query ? "head_norm_rope q" : "head_norm_rope k";
      const auto raw = [=, this] {
        return HeadView{bf16({t, groups * group_rows}), groups, per_group, d, group_rows, offset};
      };
      const auto alone = [=, this] {
        return HeadView{bf16({t, groups * per_group * d}), groups, per_group, d, per_group * d, 0};
      };
      const auto params = [&] { return ops::HeadNormRope{bf16({d}), 1e-6f, &rope, Model::kSequence}; };
      row(name + " forward", bytes(4 * n), [&] {
        return [this, p = params(), in = raw(), out = alone()] { ops::head_norm_rope_forward(stream_, p, in, out); };
      });
      // The gradient of a query is turned back where it lies.
      row(name + " backward", bytes(6 * n), [&] {
        const HeadView d_in = raw();
        return [this, p = params(), d_out = query ? d_in : alone(), in = raw(), d_in, d_w = f32({d})] {
          ops::head_norm_rope_backward(stream_, p, d_out, in, ops::Write::kSet, d_in, d_w);
        };
      });
    }
  }

  void elementwise_rows() {
    const int64_t t = model_.tokens(), c = model_.hidden, f = model_.intermediate;
    const ops::Activation activation = model_.activation;
    row("gated_activation forward", bytes(6 * t * f), [=, this] {
      return [=, this, gate_up = bf16({t, 2 * f}), out = bf16({t, f})] {
        ops::gated_activation_forward(stream_, activation, gate_up, f, out);
      };
    });
    row("gated_activation backward", bytes(10 * t * f), [=, this] {
      return [=, this, d_out = bf16({t, f}), gate_up = bf16({t, 2 * f}), d_gate_up = bf16({t, 2 * f})] {
        ops::gated_activation_backward(stream_, activation, d_out, gate_up, f, d_gate_up);
      };
    });
    row("add bf16", bytes(6 * t * c), [=, this] {
      return [this, a = bf16({t, c}), b = bf16({t, c}), out = bf16({t, c})] { ops::add(stream_, a, b, out); };
    });
    row("copy f32 to bf16", bytes(6 * t * c), [=, this] {
      return [this, from = f32({t, c}), to = bf16({t, c})] { ops::copy(stream_, from, to); };
    });
    row("copy bf16", bytes(4 * t * c), [=, this] {
      return [this, from = bf16({t, c}), to = bf16({t, c})] { ops::copy(stream_, from, to); };
    });
    row("zero f32", bytes(4 * t * c), [=, this] { return [this, x = f32({t, c})] { ops::zero(stream_, x); }; });
    for (const int ranks : {2, 4, 8}) {  // what a rank adds of the nodes of so many
      const int64_t n = t * c / ranks;
      row(format("tree_sum of {} f32 to bf16", ranks), bytes((4 * ranks + 2) * n), [=, this] {
        ops::SumProgram program;
        for (unsigned rank = 0; rank < static_cast<unsigned>(ranks); ++rank) {
          program.add_term(rank, std::countr_one(rank));
        }
        return [=, this, terms = f32({ranks, n}), out = bf16({n})] { ops::tree_sum(stream_, program, terms, out); };
      });
    }
  }

  void vocabulary_rows() {
    const int64_t t = model_.tokens(), c = model_.hidden, v = model_.vocabulary, n = kLogitTokens;
    row("logits_statistics", bytes(4 * n * v), [=, this] {
      return [=, this, logits = f32({n, v}), labels = indices(n, v), maximum = f32({n}), sum = f32({n}),
              target = f32({n})] {
        ops::logits_statistics(stream_, logits, {0, v}, labels, {0, v}, v, maximum, sum, target);
      };
    });
    row("logits_gradient", bytes(6 * n * v), [=, this] {
      return [=, this, logits = f32({n, v}), labels = indices(n, v), maximum = f32({n}), sum = f32({n}),
              d_logits = bf16({n, v})] {
        ops::logits_gradient(stream_, logits, labels, {0, v}, v, maximum, sum, 1.0f, 0.0f, d_logits);
      };
    });
    row("embedding forward", bytes(4 * t * c), [=, this] {
      return [=, this, tokens = indices(t, v), table = bf16({v, c}), out = bf16({t, c})] {
        ops::embedding_forward(stream_, {}, tokens, table, {0, v}, out);
      };
    });
    row("embedding backward", bytes(10 * t * c), [=, this] {
      return [=, this, tokens = indices(t, v), d_out = bf16({t, c}), d_table = f32({v, c})] {
        ops::embedding_backward(stream_, {}, tokens, d_out, {0, v}, d_table);
      };
    });
  }

  void optimizer_rows() {
    constexpr int64_t kParameters = int64_t{1} << 27;
    ops::AdamWParams params;
    params.lr = 1e-4f;
    row("adamw f32, bf16 value", bytes(30 * kParameters), [=, this] {
      // The second moment is not negative.
      const Tensor exp_avg_sq = memory_.allocate("exp_avg_sq", DType::kF32, {kParameters});
      ops::zero(stream_, exp_avg_sq);
      return [=, this, parameter = f32({kParameters}), gradient = f32({kParameters}), exp_avg = f32({kParameters}),
              value = bf16({kParameters})] {
        ops::adamw_update(stream_, params, parameter, gradient, exp_avg, exp_avg_sq, value);
      };
    });
    const auto total = [this] { return memory_.allocate("total", DType::kF64, {1}); };
    row("add_sum_of_squares", bytes(4 * kParameters), [=, this] {
      return [this, x = f32({kParameters}), sum = total()] { ops::add_sum_of_squares(stream_, x, sum); };
    });
    row("add_sum", bytes(4 * kParameters),
        [=, this] { return [this, x = f32({kParameters}), sum = total()] { ops::add_sum(stream_, x, sum); }; });
  }

  const Model& model_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "0.6b";
  const auto model = std::ranges::find(models(), name, &Model::name);
  if (model == models().end() || argc > 3) {
    std::fputs("usage: bench_cuda [0.6b | 1.7b | 8b | gemma] [part of an operation's name]\n", stderr);
    return 2;
  }
  try {
    Bench(*model, argc > 2 ? argv[2] : "").run();
  } catch (const Error& error) {
    std::fprintf(stderr, "bench_cuda: %s\n", error.what());
    return 1;
  }
  return 0;
}
