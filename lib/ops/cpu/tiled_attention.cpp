#include "ops/cpu/tiled_attention.h"

#include <atomic>
#include <limits>
#include <vector>

#include "ops/attention_check.h"
#include "ops/cpu/attention_tiles.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/parallel.h"

namespace invar::ops::cpu {
namespace {

// body(thread, task) for every task, taken up in order.
template <class Body>
void run_tasks(int threads, int64_t tasks, Body body) {
  std::atomic<int64_t> next = 0;
  run_on_threads(threads, [&](int thread) {
    for (int64_t task = next++; task < tasks; task = next++) body(thread, task);
  });
}

int threads_for(const Stream& stream, int64_t tasks) {
  return static_cast<int>(std::clamp<int64_t>(tasks, 1, std::max(1, stream.threads())));
}

struct ForwardScratch {
  Tile q_t, k, v, p, out;
  std::vector<float> largest, sum, correction;  // per query

  explicit ForwardScratch(const AttentionTiling& tiling)
      : q_t(tiling.head_dim, kTile),
        k(kTile, tiling.head_dim),
        v(kTile, tiling.head_dim),
        p(kTile, kTile),
        out(kTile, tiling.head_dim),
        largest(kTile),
        sum(kTile),
        correction(kTile) {}
};

// Turns scores into exp(score − largest so far), keys ascending, and says by what the earlier sums shrink.
void online_softmax(const Band& band, ForwardScratch& s) {
  for (int64_t query = 0; query < band.queries; query += 8) {
    const Float8 before = load8(&s.largest[static_cast<size_t>(query)]);
    Float8 largest = before;
    for (int64_t key = 0; key < band.keys; ++key) largest = max(load8(s.p.row(key) + query), largest);
    const Float8 correction = exp(before - largest);
    Float8 sum{};
    for (int64_t key = 0; key < band.keys; ++key) {
      float* const scores = s.p.row(key) + query;
      const Float8 p = exp(load8(scores) - largest);
      store8(scores, p);
      sum += p;
    }
    store8(&s.largest[static_cast<size_t>(query)], largest);
    store8(&s.correction[static_cast<size_t>(query)], correction);
    store8(&s.sum[static_cast<size_t>(query)], fma(load8(&s.sum[static_cast<size_t>(query)]), correction, sum));
  }
}

// out and lse of one tile of queries of one head.
void forward_tile(const AttentionTiling& tiling, int64_t query_tile, const SampleHead& q, const SampleHead& k,
                  const SampleHead& v, const SampleHead& out, const Tensor& lse, ForwardScratch& s) {
  const Range tokens = tiling.tokens_of(query_tile);
  load_rows(q, tokens, tiling.scale, s.out);
  transpose(s.out, tokens.size(), tiling.head_dim, s.q_t);
  // A finite start: in a tile where a query sees nothing, exp(start − start) is 1.
  std::fill(s.largest.begin(), s.largest.end(), std::numeric_limits<float>::lowest());
  std::fill(s.sum.begin(), s.sum.end(), 0.0f);
  zero_rows(s.out, tokens.size());

  const Range key_tiles = tiling.key_tiles_of(q.sample_begin, tokens);
  for (int64_t key_tile = key_tiles.begin; key_tile < key_tiles.end; ++key_tile) {
    const Range keys = tiling.tokens_of(key_tile);
    const Band band = tiling.band(q.sample_begin, tokens, keys);
    load_rows(k, keys, 1.0f, s.k);
    load_rows(v, keys, 1.0f, s.v);
    score_product(tiling, band, s.k, s.q_t, s.p);
    band.mask(s.p, -std::numeric_limits<float>::infinity());
    online_softmax(band, s);
    scale_rows(s.out, band.queries, tiling.head_dim, s.correction.data());
    add_over_keys(tiling, band, s.p, s.v, s.out);
  }

  for (int64_t i = 0; i < tokens.size(); ++i) {
    const auto slot = static_cast<size_t>(i);
    lse.data<float>()[(q.sample_begin + tokens.begin + i) * lse.dim(1) + q.head] = s.largest[slot] + log(s.sum[slot]);
    s.correction[slot] = 1.0f / s.sum[slot];
  }
  scale_rows(s.out, tokens.size(), tiling.head_dim, s.correction.data());
  store_rows(s.out, 0, 1.0f, tokens, out);
}

// Pairs of tiles whose gradients one thread sums: heads, query tiles and key tiles ascending, in this nesting.
struct BackwardTask {
  int64_t sample;
  int64_t group;
  Range heads;
  Range query_tiles;
  Range key_tiles;
  bool writes_q;
  bool writes_kv;
};

// One task per sample and group takes each pair of tiles once, at five products. With too few of those for the threads,
// d_q is summed apart from d_k and d_v, tile by tile, at three and four products. Both sum in the same order.
std::vector<BackwardTask> plan_backward(const AttentionTiling& tiling, int threads) {
  const int64_t units = tiling.samples * tiling.groups;
  const bool whole = 5 * ceil_div(units, threads) * threads <= 7 * units;
  const Range heads{0, tiling.heads_per_group};
  const Range tiles{0, tiling.tiles};
  std::vector<BackwardTask> tasks;
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t sample = unit / tiling.groups;
    const int64_t group = unit % tiling.groups;
    if (whole) {
      tasks.push_back({sample, group, heads, tiles, tiles, true, true});
      continue;
    }
    for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
      tasks.push_back({sample, group, heads, tiles, {tile, tile + 1}, false, true});
    }
    for (int64_t head = 0; head < tiling.heads_per_group; ++head) {
      for (int64_t tile = tiling.tiles - 1; tile >= 0; --tile) {
        tasks.push_back({sample, group, {head, head + 1}, {tile, tile + 1}, tiles, true, false});
      }
    }
  }
  return tasks;
}

struct BackwardScratch {
  Tile q, q_t, d_out, d_out_t, k, v, p, d_scores, d_q;
  Tile d_k, d_v;                  // all key tiles of a task
  std::vector<float> lse, delta;  // per query

  BackwardScratch(const AttentionTiling& tiling, int64_t key_rows)
      : q(kTile, tiling.head_dim),
        q_t(tiling.head_dim, kTile),
        d_out(kTile, tiling.head_dim),
        d_out_t(tiling.head_dim, kTile),
        k(kTile, tiling.head_dim),
        v(kTile, tiling.head_dim),
        p(kTile, kTile),
        d_scores(kTile, kTile),
        d_q(kTile, tiling.head_dim),
        d_k(key_rows, tiling.head_dim),
        d_v(key_rows, tiling.head_dim),
        lse(kTile),
        delta(kTile) {}
};

// The operands of one call to backward.
struct BackwardOperands {
  const HeadView &q, &k, &v, &d_out, &d_q, &d_k, &d_v;
  const Tensor &lse, &delta;
};

class BackwardWorker {
 public:
  BackwardWorker(const AttentionTiling& tiling, const BackwardOperands& operands, int64_t key_rows)
      : tiling_(tiling), operands_(operands), s_(tiling, key_rows) {}

  void run(const BackwardTask& task) {
    loaded_key_tile_ = -1;
    const int64_t key_rows = task.key_tiles.size() * kTile;
    if (task.writes_kv) {
      zero_rows(s_.d_k, key_rows);
      zero_rows(s_.d_v, key_rows);
    }
    for (int64_t head = task.heads.begin; head < task.heads.end; ++head) {
      for (int64_t tile = task.query_tiles.begin; tile < task.query_tiles.end; ++tile) sum_query_tile(task, head, tile);
    }
    if (!task.writes_kv) return;
    const Range tokens{task.key_tiles.begin * kTile, std::min(task.key_tiles.end * kTile, tiling_.sequence)};
    store_rows(s_.d_k, 0, 1.0f, tokens, rows(operands_.d_k, task, 0));
    store_rows(s_.d_v, 0, 1.0f, tokens, rows(operands_.d_v, task, 0));
  }

 private:
  // head: in the task's group
  SampleHead rows(const HeadView& view, const BackwardTask& task, int64_t head) const {
    return {view, task.sample * tiling_.sequence, task.group * view.heads_per_group + head};
  }

  void sum_query_tile(const BackwardTask& task, int64_t head, int64_t query_tile) {
    const Range queries = tiling_.tokens_of(query_tile);
    const int64_t sample_begin = task.sample * tiling_.sequence;
    const Range key_tiles = intersect(tiling_.key_tiles_of(sample_begin, queries), task.key_tiles);
    if (key_tiles.empty()) return;
    load_queries(task, head, queries);
    for (int64_t key_tile = key_tiles.begin; key_tile < key_tiles.end; ++key_tile) {
      load_keys(task, key_tile);
      const Band band = tiling_.band(sample_begin, queries, tiling_.tokens_of(key_tile));
      recompute(band);
      if (task.writes_q) add_over_keys(tiling_, band, s_.d_scores, s_.k, s_.d_q);
      if (task.writes_kv) {
        const int64_t first_row = (key_tile - task.key_tiles.begin) * kTile;
        add_over_queries(band, s_.p, s_.d_out, s_.d_v, first_row);
        add_over_queries(band, s_.d_scores, s_.q, s_.d_k, first_row);
      }
    }
    if (task.writes_q) {
      store_rows(s_.d_q, 0, tiling_.scale, queries, rows(operands_.d_q, task, head));
    }
  }

  void load_queries(const BackwardTask& task, int64_t head, Range tokens) {
    load_rows(rows(operands_.q, task, head), tokens, tiling_.scale, s_.q);
    transpose(s_.q, tokens.size(), tiling_.head_dim, s_.q_t);
    load_rows(rows(operands_.d_out, task, head), tokens, 1.0f, s_.d_out);
    transpose(s_.d_out, tokens.size(), tiling_.head_dim, s_.d_out_t);
    const int64_t heads = tiling_.groups * tiling_.heads_per_group;
    const int64_t first =
        (task.sample * tiling_.sequence + tokens.begin) * heads + task.group * tiling_.heads_per_group + head;
    for (int64_t i = 0; i < tokens.size(); ++i) {
      s_.lse[static_cast<size_t>(i)] = operands_.lse.data<float>()[first + i * heads];
      s_.delta[static_cast<size_t>(i)] = operands_.delta.data<float>()[first + i * heads];
    }
    if (task.writes_q) zero_rows(s_.d_q, tokens.size());
  }

  void load_keys(const BackwardTask& task, int64_t key_tile) {
    if (key_tile == loaded_key_tile_) return;
    load_rows(rows(operands_.k, task, 0), tiling_.tokens_of(key_tile), 1.0f, s_.k);
    load_rows(rows(operands_.v, task, 0), tiling_.tokens_of(key_tile), 1.0f, s_.v);
    loaded_key_tile_ = key_tile;
  }

  // p = exp(s − lse) and d_scores = p ∘ (dO·Vᵀ − delta), both (keys, queries).
  void recompute(const Band& band) {
    score_product(tiling_, band, s_.k, s_.q_t, s_.p);
    score_product(tiling_, band, s_.v, s_.d_out_t, s_.d_scores);
    for (int64_t key = 0; key < band.keys; ++key) {
      for (int64_t query = 0; query < band.queries; query += 8) {
        const auto slot = static_cast<size_t>(query);
        const Float8 p = exp(load8(s_.p.row(key) + query) - load8(&s_.lse[slot]));
        store8(s_.p.row(key) + query, p);
        store8(s_.d_scores.row(key) + query, p * (load8(s_.d_scores.row(key) + query) - load8(&s_.delta[slot])));
      }
    }
    band.mask(s_.p, 0.0f);
    band.mask(s_.d_scores, 0.0f);
  }

  // Rows of `to` from first_row on (keys, D) += weights (keys, queries) · from (queries, D).
  void add_over_queries(const Band& band, const Tile& weights, const Tile& from, Tile& to, int64_t first_row) {
    tile_product(
        band.keys, tiling_.head_dim, LeftFactor::plain(weights), from, to, true,
        [&](Range keys, Range) { return band.queries_of(keys); }, first_row);
  }

  const AttentionTiling& tiling_;
  const BackwardOperands& operands_;
  BackwardScratch s_;
  int64_t loaded_key_tile_ = -1;
};

// delta (T, Hq) = rowsum(d_out ∘ out), which is rowsum(P ∘ dP).
void fill_delta(const Stream& stream, const HeadView& out, const HeadView& d_out, const Tensor& delta) {
  visit_float("attention", out.buffer.dtype(), [&]<class T>(std::type_identity<T>) {
    parallel_for(stream.threads(), out.tokens(), out.heads() * out.head_dim, [&](Range tokens) {
      for (int64_t token = tokens.begin; token < tokens.end; ++token) {
        for (int64_t head = 0; head < out.heads(); ++head) {
          const T* a = out.buffer.data<T>() + out.index(token, head);
          const T* b = d_out.buffer.data<T>() + d_out.index(token, head);
          delta.data<float>()[token * out.heads() + head] =
              lane_sum(out.head_dim, [=](int64_t d, float sum) { return std::fma(load(a[d]), load(b[d]), sum); });
        }
      }
    });
  });
}

class TiledAttention : public AttentionBackend {
 public:
  std::string name() const override { return "tiled"; }

  std::string refusal(const AttentionParams& params, const HeadView& q, const HeadView& k) const override {
    const DType dtype = q.buffer.dtype();
    if (dtype != DType::kF32 && dtype != DType::kBF16) {
      return format("it takes f32 and bf16, not {}", name_of(dtype));
    }
    return common_attention_refusal(params, q, k);
  }

  void forward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
               const HeadView& v, const HeadView& out, const Tensor& lse) const override {
    check_attention_forward(stream, params, q, k, v, out, lse);
    const AttentionTiling tiling(params, q);
    // Sample, group, query tile, head: the keys of a group stay in the last cache, and its longest tiles come first.
    const int64_t tasks = tiling.samples * q.heads() * tiling.tiles;
    const int threads = threads_for(stream, tasks);
    std::vector<ForwardScratch> scratch(static_cast<size_t>(threads), ForwardScratch(tiling));
    run_tasks(threads, tasks, [&](int thread, int64_t task) {
      const int64_t head = task % q.heads_per_group;
      const int64_t tile = tiling.tiles - 1 - task / q.heads_per_group % tiling.tiles;
      const int64_t unit = task / (q.heads_per_group * tiling.tiles);
      const int64_t sample = unit / q.groups;
      const int64_t group = unit % q.groups;
      const auto rows = [&](const HeadView& view, int64_t index) {
        return SampleHead{view, sample * tiling.sequence, group * view.heads_per_group + index};
      };
      forward_tile(tiling, tile, rows(q, head), rows(k, 0), rows(v, 0), rows(out, head), lse,
                   scratch[static_cast<size_t>(thread)]);
    });
  }

  void backward(const Stream& stream, const AttentionParams& params, const HeadView& q, const HeadView& k,
                const HeadView& v, const HeadView& out, const Tensor& lse, const HeadView& d_out, const Tensor& delta,
                const HeadView& d_q, const HeadView& d_k, const HeadView& d_v) const override {
    check_attention_backward(stream, params, q, k, v, out, lse, d_out, delta, d_q, d_k, d_v);
    const AttentionTiling tiling(params, q);
    fill_delta(stream, out, d_out, delta);

    const std::vector<BackwardTask> tasks = plan_backward(tiling, std::max(1, stream.threads()));
    const auto count = static_cast<int64_t>(tasks.size());
    if (count == 0) return;
    const int threads = threads_for(stream, count);
    const int64_t key_rows = tasks.front().key_tiles.size() * kTile;
    const BackwardOperands operands{q, k, v, d_out, d_q, d_k, d_v, lse, delta};
    std::vector<BackwardWorker> workers(static_cast<size_t>(threads), BackwardWorker(tiling, operands, key_rows));
    run_tasks(threads, count, [&](int thread, int64_t task) {
      workers[static_cast<size_t>(thread)].run(tasks[static_cast<size_t>(task)]);
    });
  }
};

}  // namespace

const AttentionBackend& tiled_attention() {
  static const TiledAttention tiled;
  return tiled;
}

}  // namespace invar::ops::cpu
