#include <array>
#include <cmath>

#include "app/selftest.h"
#include "ops/proofs.h"

namespace invar::app {
namespace {

using ops::HeadView;

struct Shape {
  DType dtype = DType::kF32;
  int64_t head_dim = 64;
  int64_t window = 0;
  // Enough for several tiles of a sequence, the last one not full.
  int64_t samples = 2;
  int64_t sequence = 200;
  int64_t groups = 4;
  int64_t heads_per_group = 2;
};

// What one call is given of all samples and KV groups.
struct Part {
  Range samples, groups;
};

Part whole(const Shape& shape) {
  return {{0, shape.samples}, {0, shape.groups}};
}

// The operands of a call as a layer of a rank has them: q and k alone, v in the rows [q heads, k, v] of a projection.
class Call {
 public:
  Call(Bench& bench, const Shape& shape, const Part& part) : bench_(bench), shape_(shape), part_(part) {
    const int64_t groups = part.groups.size();
    const int64_t d = shape.head_dim;
    const int64_t queries = shape.heads_per_group * d;
    params_ = {shape.sequence, 1.0f / std::sqrt(static_cast<float>(d)), shape.window, Tensor(), {true}};
    const auto view = [&](int64_t heads_per_group, int64_t stride, int64_t offset) {
      return HeadView{
          bench.unwritten(shape.dtype, {tokens(), groups * stride}), groups, heads_per_group, d, stride, offset};
    };
    for (HeadView* query : {&q_, &out_, &d_out_, &d_q_}) *query = view(shape.heads_per_group, queries, 0);
    for (HeadView* key : {&k_, &d_k_}) *key = view(1, d, 0);
    for (HeadView* value : {&v_, &d_v_}) *value = view(1, queries + 2 * d, queries + d);
    lse_ = bench.unwritten(DType::kF32, {tokens(), groups * shape.heads_per_group});
    delta_ = bench.unwritten(DType::kF32, {tokens(), groups * shape.heads_per_group});
    fill(q_, 1);
    fill(k_, 2);
    fill(v_, 3);
    fill(d_out_, 4);
  }

  std::string backend() const { return ops::choose_attention(bench_.stream().device(), params_, q_, k_).name(); }

  void run() const {
    const ops::AttentionBackend& backend = ops::choose_attention(bench_.stream().device(), params_, q_, k_);
    backend.forward(bench_.stream(), params_, q_, k_, v_, out_, lse_);
    backend.backward(bench_.stream(), params_, q_, k_, v_, out_, lse_, d_out_, delta_, d_q_, d_k_, d_v_);
  }

  // name and bits by (token, head, element) of everything that was computed.
  std::array<std::pair<const char*, Bits>, 5> results() const {
    return {std::pair{"out", read(out_)},
            {"lse", bench_.bits(lse_)},
            {"d_q", read(d_q_)},
            {"d_k", read(d_k_)},
            {"d_v", read(d_v_)}};
  }

 private:
  int64_t tokens() const { return part_.samples.size() * shape_.sequence; }

  // Values that are a function of the place among all samples and groups.
  void fill(const HeadView& view, uint64_t seed) {
    std::vector<float> values(static_cast<size_t>(view.buffer.numel()));
    const int64_t all_heads = shape_.groups * view.heads_per_group;
    for_each_element(view, [&](int64_t token, int64_t head, int64_t d, size_t at) {
      const int64_t of_all = (part_.samples.begin * shape_.sequence + token) * all_heads +
                             part_.groups.begin * view.heads_per_group + head;
      values[at] = random_float(seed, of_all * view.head_dim + d, 1);
    });
    const Tensor filled = bench_.filled(shape_.dtype, {view.buffer.dim(0), view.buffer.dim(1)}, values);
    copy_across(bench_.stream(), filled, view.buffer);
  }

  Bits read(const HeadView& view) const {
    const Bits all = bench_.bits(view.buffer);
    Bits bits;
    for_each_element(view, [&](int64_t, int64_t, int64_t, size_t at) { bits.push_back(all[at]); });
    return bits;
  }

  template <class F>
  static void for_each_element(const HeadView& view, const F& f) {
    for (int64_t token = 0; token < view.tokens(); ++token) {
      for (int64_t head = 0; head < view.heads(); ++head) {
        for (int64_t d = 0; d < view.head_dim; ++d) {
          f(token, head, d, static_cast<size_t>(view.index(token, head) + d));
        }
      }
    }
  }

  Bench& bench_;
  const Shape& shape_;
  Part part_;
  ops::AttentionParams params_;
  HeadView q_, k_, v_, out_, d_out_, d_q_, d_k_, d_v_;
  Tensor lse_, delta_;
};

// Of the bits of all samples and groups those of a part.
Bits cut(const Bits& all, const Shape& shape, const Part& part) {
  const auto tokens = static_cast<size_t>(shape.samples * shape.sequence);
  const size_t row = all.size() / tokens;
  const size_t group = row / static_cast<size_t>(shape.groups);
  Bits bits;
  for (int64_t t = part.samples.begin * shape.sequence; t < part.samples.end * shape.sequence; ++t) {
    const auto first = all.begin() + static_cast<int64_t>(row) * t;
    bits.insert(bits.end(), first + part.groups.begin * static_cast<int64_t>(group),
                first + part.groups.end * static_cast<int64_t>(group));
  }
  return bits;
}

std::string parts_against_whole(const Stream& stream, const Shape& shape) {
  Bench bench(stream);
  const Call all(bench, shape, whole(shape));
  all.run();
  const auto expected = all.results();
  std::vector<Part> parts = {whole(shape)};  // and again
  for (const Range& half : {Range{0, 2}, Range{2, 4}}) parts.push_back({{0, shape.samples}, half});
  for (int64_t group = 0; group < shape.groups; ++group) parts.push_back({{0, shape.samples}, {group, group + 1}});
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    parts.push_back({{sample, sample + 1}, {0, shape.groups}});
    parts.push_back({{sample, sample + 1}, {1, 2}});
  }
  for (const Part& part : parts) {
    Bench own(stream);
    const Call call(own, shape, part);
    call.run();
    const auto actual = call.results();
    for (size_t i = 0; i < actual.size(); ++i) {
      const std::string found = difference(actual[i].second, cut(expected[i].second, shape, part));
      if (found.empty()) continue;
      return format("{} of samples {} to {}, KV groups {} to {}: {}", actual[i].first, part.samples.begin,
                    part.samples.end, part.groups.begin, part.groups.end, found);
    }
  }
  return "";
}

}  // namespace

void check_attention(SelftestReport& report, const Stream& stream) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t head_dim : {64, 128}) {
      // A window of a fifth or more of the sequence may be another backend's than a smaller one.
      for (const int64_t window : {0, 100, 30}) {
        const Shape shape{dtype, head_dim, window};
        Bench bench(stream);
        const std::string backend = Call(bench, shape, whole(shape)).backend();
        const std::string visible = window == 0 ? "causal" : format("window {}", window);
        report.check(
            format("attention {} {} of heads of {}, {}: heads, samples", backend, name_of(dtype), head_dim, visible),
            [&] { return parts_against_whole(stream, shape); });
      }
    }
  }
  if (stream.device() != DeviceType::kCuda) return;
  report.tell("plans of cuDNN's attention proved", format("{}", ops::proofs(stream).attention_plans));
}

}  // namespace invar::app
