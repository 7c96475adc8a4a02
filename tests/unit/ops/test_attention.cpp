#include "ops/attention.h"

#include <algorithm>
#include <thread>

#include "attention_case.h"

namespace invar::test {
namespace {

using ops::AttentionBackend;
using ops::choose_attention;
using ops::reference_attention;

// Columns [begin, end) of each row.
std::vector<double> columns(const std::vector<double>& values, int64_t row, int64_t begin, int64_t end) {
  std::vector<double> part;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % row;
    if (begin <= column && column < end) part.push_back(values[i]);
  }
  return part;
}

const std::vector<AttentionShape> kShapes = {
    // samples, sequence, groups, heads per group, head_dim
    {1, 1, 1, 1, 1},  {3, 1, 2, 2, 5},    {1, 7, 1, 4, 16},    {2, 13, 2, 1, 10}, {1, 96, 1, 2, 64},   {2, 97, 1, 1, 9},
    {1, 95, 2, 4, 8}, {2, 150, 2, 2, 40}, {1, 333, 1, 1, 128}, {3, 50, 1, 4, 33}, {1, 200, 1, 2, 272},
};
const std::vector<int64_t> kWindows = {0, 1, 7, 64};

TEST_CASE("tiled attention equals the reference in fp32") {
  for (AttentionShape shape : kShapes) {
    for (int64_t window : kWindows) {
      shape.window = window;
      AttentionCase actual(shape, DType::kF32), expected(shape, DType::kF32);
      const double error = worst_error(run_attention(tiled(), actual), run_attention(reference_attention(), expected));
      INFO("sequence " << shape.sequence << " head_dim " << shape.head_dim << " window " << window);
      CHECK(error < 1e-5);
      CHECK(actual.unused_untouched());
    }
  }
}

TEST_CASE("tiled attention equals the reference within the rounding of bf16") {
  for (AttentionShape shape : kShapes) {
    for (int64_t window : kWindows) {
      shape.window = window;
      AttentionCase actual(shape, DType::kBF16), expected(shape, DType::kBF16);
      const double error = worst_error(run_attention(tiled(), actual), run_attention(reference_attention(), expected));
      INFO("sequence " << shape.sequence << " head_dim " << shape.head_dim << " window " << window);
      CHECK(error < 0x1p-6);
      CHECK(actual.unused_untouched());
    }
  }
}

TEST_CASE("a window that is off by one is seen") {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase actual({2, 150, 1, 2, 40, 64}, dtype), expected({2, 150, 1, 2, 40, 65}, dtype);
    CHECK(worst_error(run_attention(tiled(), actual), run_attention(reference_attention(), expected)) > 0.03);
  }
}

TEST_CASE("a window as long as the sample hides nothing") {
  AttentionCase open({2, 120, 1, 2, 24, 0}, DType::kF32);
  const AttentionResult expected = run_attention(tiled(), open);
  for (int64_t window : {120, 121, 100000}) {
    AttentionCase limited({2, 120, 1, 2, 24, window}, DType::kF32);
    CHECK(same_bits(run_attention(tiled(), limited), expected));
  }
}

TEST_CASE("equal scores give the mean of the visible values and the log of their number") {
  const AttentionShape shape{2, 210, 1, 1, 3, 100};
  for (const AttentionBackend* backend : {&tiled(), &reference_attention()}) {
    AttentionCase c(shape, DType::kF32);
    AttentionCase::write(c.q, std::vector<double>(static_cast<size_t>(shape.tokens() * 3), 0.0));
    const AttentionResult result = run_attention(*backend, c);
    const std::vector<double> values = AttentionCase::read(c.v);
    for (int64_t token = 0; token < shape.tokens(); ++token) {
      const int64_t visible = std::min<int64_t>(token % shape.sequence + 1, shape.window);
      CHECK(result.lse[static_cast<size_t>(token)] ==
            Approx(std::log(static_cast<double>(visible))).epsilon(1e-6).margin(1e-12));
      double mean = 0;
      for (int64_t key = token - visible + 1; key <= token; ++key) {
        mean += values[static_cast<size_t>(key * 3)] / static_cast<double>(visible);
      }
      CHECK(result.out[static_cast<size_t>(token * 3)] == Approx(mean).epsilon(1e-5).margin(1e-6));
    }
  }
}

TEST_CASE("scores of any size neither overflow nor vanish") {
  for (float scale : {-40.0f, 40.0f, 1000.0f}) {
    AttentionCase actual({1, 230, 1, 2, 16}, DType::kF32), expected({1, 230, 1, 2, 16}, DType::kF32);
    actual.params.scale = expected.params.scale = scale;
    const AttentionResult result = run_attention(tiled(), actual);
    const AttentionResult reference = run_attention(reference_attention(), expected);
    // A score of 1e4 carries an fp32 error of 1e-3, and so does a probability.
    CHECK(error_of(result.lse, reference.lse) < 1e-6);
    CHECK(error_of(result.out, reference.out) < 1e-2);
    CHECK(error_of(result.d_q, result.d_q) == 0);  // finite
    CHECK(error_of(result.d_k, result.d_k) == 0);
  }
}

TEST_CASE("the gradients of the reference are those of finite differences") {
  for (int64_t window : {0, 3}) {
    AttentionCase c({2, 6, 2, 2, 3, window}, DType::kF64);
    const AttentionResult result = run_attention(reference_attention(), c);
    const std::vector<double> weights = AttentionCase::read(c.d_out);
    HostTensor lse(DType::kF32, {c.q.tokens(), c.q.heads()});
    const auto loss_with = [&](const ops::HeadView& input) {
      return [&](const std::vector<double>& values) {
        AttentionCase::write(input, values);
        reference_attention().forward(Stream(DeviceType::kCpu), c.params, c.q, c.k, c.v, c.out, lse);
        return dot(AttentionCase::read(c.out), weights);
      };
    };
    const auto check = [&](const ops::HeadView& input, const std::vector<double>& gradient) {
      const std::vector<double> values = AttentionCase::read(input);
      CHECK(error_of(gradient, numeric_gradient(loss_with(input), values)) < 1e-7);
      AttentionCase::write(input, values);
    };
    check(c.q, result.d_q);
    check(c.k, result.d_k);
    check(c.v, result.d_v);
  }
}

TEST_CASE("bits do not depend on the number of threads") {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t window : {0, 70}) {
      const AttentionShape shape{3, 300, 2, 2, 24, window};
      AttentionCase one(shape, dtype);
      const AttentionResult expected = run_attention(tiled(), one, 1);
      // 6 units of sample and group: whole up to 3 threads and at 6, tile by tile at 4, 7 and 16.
      for (int threads : {2, 3, 4, 6, 7, 16}) {
        AttentionCase many(shape, dtype);
        INFO(threads << " threads");
        CHECK(same_bits(run_attention(tiled(), many, threads), expected));
      }
    }
  }
}

TEST_CASE("a sample, a group or a query head alone has the bits that it has in any call") {
  const AttentionShape shape{3, 130, 3, 4, 20, 50};
  const int64_t q_row = 12 * 20;
  const int64_t k_row = 3 * 20;
  AttentionCase whole(shape, DType::kF32);
  const AttentionResult all = run_attention(tiled(), whole, 2);

  for (int64_t sample = 0; sample < 3; ++sample) {
    AttentionCase alone(shape, DType::kF32);
    const AttentionResult part = run_attention(tiled(), alone.sample(sample));
    const auto rows = [&](const std::vector<double>& values) {
      const auto size = static_cast<std::ptrdiff_t>(values.size()) / 3;
      return std::vector<double>(values.begin() + sample * size, values.begin() + (sample + 1) * size);
    };
    CHECK(same_bits(part, {rows(all.out), rows(all.lse), rows(all.d_q), rows(all.d_k), rows(all.d_v)}));
  }
  for (int64_t group = 0; group < 3; ++group) {
    AttentionCase alone(shape, DType::kF32);
    const AttentionResult part = run_attention(tiled(), alone.group(group));
    const auto of_group = [&](const std::vector<double>& values, int64_t row) {
      return columns(values, row, group * row / 3, (group + 1) * row / 3);
    };
    CHECK(same_bits(part, {of_group(all.out, q_row), of_group(all.lse, 12), of_group(all.d_q, q_row),
                           of_group(all.d_k, k_row), of_group(all.d_v, k_row)}));
  }
  for (int64_t head = 0; head < 4; ++head) {
    AttentionCase alone(shape, DType::kF32);
    const AttentionResult part = run_attention(tiled(), alone.query_head(head));
    const auto of_head = [&](const std::vector<double>& values, int64_t row) {
      return columns(values, row / 3, head * row / 12, (head + 1) * row / 12);
    };
    CHECK(same_bits(part.out, of_head(all.out, q_row)));
    CHECK(same_bits(part.lse, of_head(all.lse, 12)));
    CHECK(same_bits(part.d_q, of_head(all.d_q, q_row)));
    CHECK_FALSE(same_bits(part.d_k, all.d_k));  // the sum over the group's heads
  }
}

TEST_CASE("groups that see the same keys and values have the bits of groups with copies of them") {
  const AttentionShape shape{2, 130, 3, 2, 20, 50};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AttentionCase copied(shape, dtype);
    AttentionCase shared(shape, dtype);
    CHECK_FALSE(same_bits(run_attention(tiled(), copied), run_attention(tiled(), shared.on_first_keys())));
    copied.repeat_first_keys();
    CHECK(same_bits(run_attention(tiled(), copied, 2), run_attention(tiled(), shared.on_first_keys(), 2)));
  }
}

TEST_CASE("nothing crosses from one sample into another") {
  const AttentionShape shape{3, 101, 1, 2, 16};
  AttentionCase clean(shape, DType::kF32), poisoned(shape, DType::kF32);
  const AttentionOperands middle = poisoned.sample(1);
  for (const ops::HeadView* view : {&middle.q, &middle.k, &middle.v, &middle.d_out}) {
    AttentionCase::write(*view, std::vector<double>(static_cast<size_t>(AttentionCase::count(*view)), NAN));
  }
  const AttentionResult expected = run_attention(tiled(), clean);
  const AttentionResult actual = run_attention(tiled(), poisoned);
  const auto others = [](const std::vector<double>& values) {
    std::vector<double> rows = values;
    const auto third = static_cast<std::ptrdiff_t>(values.size()) / 3;
    rows.erase(rows.begin() + third, rows.begin() + 2 * third);
    return rows;
  };
  CHECK(same_bits(others(actual.out), others(expected.out)));
  CHECK(same_bits(others(actual.d_q), others(expected.d_q)));
  CHECK(same_bits(others(actual.d_k), others(expected.d_k)));
  CHECK(same_bits(others(actual.d_v), others(expected.d_v)));
  CHECK(std::isnan(actual.out[actual.out.size() / 2]));
}

TEST_CASE("a later token changes nothing before it") {
  const AttentionShape shape{1, 205, 1, 2, 16};
  AttentionCase before(shape, DType::kF32), after(shape, DType::kF32);
  const int64_t changed = 130;
  for (const ops::HeadView* view : {&after.k, &after.v}) {
    std::vector<double> values = AttentionCase::read(*view);
    for (size_t i = changed * 16; i < values.size(); ++i) values[i] = -3 * values[i] + 1;
    AttentionCase::write(*view, values);
  }
  const auto rows = [](const std::vector<double>& values, int64_t begin, int64_t end) {
    return std::vector<double>(values.begin() + begin * 32, values.begin() + end * 32);
  };
  const AttentionResult a = run_attention(tiled(), before), b = run_attention(tiled(), after);
  CHECK(same_bits(rows(a.out, 0, changed), rows(b.out, 0, changed)));
  CHECK_FALSE(same_bits(rows(a.out, changed, changed + 1), rows(b.out, changed, changed + 1)));
}

TEST_CASE("ranks that are threads of one process do not disturb each other") {
  const AttentionShape shape{2, 150, 2, 2, 16, 40};
  AttentionCase alone(shape, DType::kF32);
  const AttentionResult expected = run_attention(tiled(), alone);
  const AttentionBackend& backend = tiled();
  std::vector<int> same(4);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      AttentionCase own(shape, DType::kF32);
      same[static_cast<size_t>(rank)] = same_bits(run_attention(backend, own, 1 + rank % 2), expected);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(same == std::vector<int>{1, 1, 1, 1});
}

std::string refusal_of(DeviceType device, const AttentionOperands& o) {
  return message_of(ErrorKind::kConfig, [&] { choose_attention(device, o.params, o.q, o.k); });
}

TEST_CASE("what no backend takes is refused with the reasons") {
  AttentionCase c({2, 4, 1, 2, 8, 3}, DType::kF32);
  CHECK(refusal_of(DeviceType::kCpu, c).empty());
  CHECK(refusal_of(DeviceType::kMeta, c).empty());
  CHECK(
      contains(refusal_of(DeviceType::kCuda, c), "no attention on cuda for 2 query heads on 1 key heads, head_dim 8"));

  AttentionOperands o = c;
  o.params.window = -3;
  CHECK(contains(refusal_of(DeviceType::kCpu, o), "tiled: the window is -3; it must be 0"));
  CHECK(contains(refusal_of(DeviceType::kMeta, o), "meta: the window is -3; it must be 0"));
  o = c;
  o.params.sequence_length = 3;
  CHECK(contains(refusal_of(DeviceType::kCpu, o), "8 tokens are not whole samples of 3"));
  AttentionCase bf16({2, 4, 1, 2, 8, 3}, DType::kBF16), f64({2, 4, 1, 2, 8, 3}, DType::kF64);
  o = c;
  o.k = bf16.k;
  CHECK(contains(refusal_of(DeviceType::kCpu, o), "q is f32 and k bf16"));
  CHECK(contains(refusal_of(DeviceType::kCpu, f64), "it takes f32 and bf16, not f64"));
}

TEST_CASE("meta checks the operands and does nothing") {
  AttentionCase c({2, 4, 2, 2, 8, 3}, DType::kBF16);
  AttentionOperands o = c;
  for (ops::HeadView* view : o.views()) {
    view->buffer = Tensor(nullptr, DType::kBF16, DeviceType::kMeta, view->buffer.shape());
  }
  const Tensor sums(nullptr, DType::kF32, DeviceType::kMeta, {8, 4});
  const Tensor wrong(nullptr, DType::kF32, DeviceType::kMeta, {8, 3});
  const Stream stream(DeviceType::kMeta);
  const AttentionBackend& meta = choose_attention(DeviceType::kMeta, o.params, o.q, o.k);
  const auto forward = [&](const Tensor& lse) {
    return message_of(ErrorKind::kFault, [&] { meta.forward(stream, o.params, o.q, o.k, o.v, o.out, lse); });
  };
  const auto backward = [&](const Tensor& delta) {
    return message_of(ErrorKind::kFault, [&] {
      meta.backward(stream, o.params, o.q, o.k, o.v, o.out, sums, o.d_out, delta, o.d_q, o.d_k, o.d_v);
    });
  };
  CHECK(forward(sums).empty());
  CHECK(backward(sums).empty());
  CHECK(contains(forward(wrong), "attention_forward: lse is"));
  CHECK(contains(backward(wrong), "attention_backward: delta is"));
  o.d_v.heads_per_group = 2;
  CHECK(contains(backward(sums), "d_v"));
  o.v = c.v;
  CHECK(contains(forward(sums), "the stream is on meta"));
}

TEST_CASE("on meta the memory of a proof is noted in invariant numerics") {
  AttentionCase c({2, 4, 2, 2, 8, 3}, DType::kBF16);
  AttentionOperands o = c;
  for (ops::HeadView* view : o.views()) {
    view->buffer = Tensor(nullptr, DType::kBF16, DeviceType::kMeta, view->buffer.shape());
  }
  const Tensor sums(nullptr, DType::kF32, DeviceType::kMeta, {8, 4});
  const AttentionBackend& meta = choose_attention(DeviceType::kMeta, o.params, o.q, o.k);
  const Stream stream = Stream::meta(DeviceType::kCuda);
  int64_t proof = 0;
  const auto forward = [&](bool invariant, int64_t* noted) {
    o.params.numerics = {invariant, noted};
    meta.forward(stream, o.params, o.q, o.k, o.v, o.out, sums);
    return proof;
  };
  CHECK(forward(false, &proof) == 0);
  CHECK(forward(true, nullptr) == 0);
  // 8 tokens in rows of [2 q, k, v] twice and 3 unused elements, each of q, k and v in such rows of its own.
  const int64_t read = 3 * 8 * 67 * 2;
  const int64_t of_forward = forward(true, &proof);
  CHECK(of_forward > read);
  CHECK(of_forward < read + 8192);
  meta.backward(stream, o.params, o.q, o.k, o.v, o.out, sums, o.d_out, sums, o.d_q, o.d_k, o.d_v);
  CHECK(proof == of_forward + 2 * 8 * 32 * 2);                  // and out and d_out
  CHECK(forward(true, &proof) == of_forward + 2 * 8 * 32 * 2);  // the largest stays
}

TEST_CASE("on meta the memory of a proof has room for copies of keys that groups share") {
  const auto noted = [](int64_t groups) {
    const auto view = [&](int64_t heads, int64_t stride) {
      const Tensor buffer(nullptr, DType::kBF16, DeviceType::kMeta, {64, heads * 8});
      return ops::HeadView{buffer, groups, 1, 8, stride, 0};
    };
    const Tensor sums(nullptr, DType::kF32, DeviceType::kMeta, {64, groups});
    const Stream stream = Stream::meta(DeviceType::kCuda);
    int64_t proof = 0;
    const ops::AttentionParams params{64, 1.0f, 0, Tensor(), {true, &proof}};
    const ops::HeadView q = view(groups, 8), k = view(1, 0);
    ops::choose_attention(DeviceType::kMeta, params, q, k).forward(stream, params, q, k, k, view(groups, 8), sums);
    return proof;
  };
  CHECK(noted(5) - noted(1) == 4 * 3 * 64 * 8 * 2);  // each of q, k and v
}

TEST_CASE("on meta no proof is noted for a call that cuDNN does not take") {
  const auto noted = [](const AttentionShape& shape, DType dtype, bool documents = false) {
    AttentionCase c(shape, dtype);
    AttentionOperands o = c;
    for (ops::HeadView* view : o.views()) {
      view->buffer = Tensor(nullptr, dtype, DeviceType::kMeta, view->buffer.shape());
    }
    if (documents) o.params.document_starts = Tensor(nullptr, DType::kI32, DeviceType::kMeta, {o.q.tokens()});
    const Tensor sums(nullptr, DType::kF32, DeviceType::kMeta, {o.q.tokens(), o.q.heads()});
    const Stream stream = Stream::meta(DeviceType::kCuda);
    int64_t proof = 0;
    o.params.numerics = {true, &proof};
    const AttentionBackend& meta = choose_attention(DeviceType::kMeta, o.params, o.q, o.k);
    meta.forward(stream, o.params, o.q, o.k, o.v, o.out, sums);
    meta.backward(stream, o.params, o.q, o.k, o.v, o.out, sums, o.d_out, sums, o.d_q, o.d_k, o.d_v);
    return proof > 0;
  };
  CHECK(noted({1, 16, 1, 2, 256, 4}, DType::kBF16));
  CHECK_FALSE(noted({1, 16, 1, 2, 256, 4}, DType::kF32));
  CHECK_FALSE(noted({1, 16, 1, 2, 256, 4}, DType::kBF16, true));
  CHECK_FALSE(noted({1, 16, 1, 2, 256, 3}, DType::kBF16));  // less than a fifth of the sequence
  CHECK_FALSE(noted({1, 16, 1, 2, 264, 4}, DType::kBF16));
  CHECK_FALSE(noted({1, 16, 1, 2, 12, 4}, DType::kBF16));
}

TEST_CASE("wrong operands are faults on the CPU too") {
  AttentionCase c({2, 4, 2, 2, 8}, DType::kF32);
  HostTensor lse(DType::kF32, {8, 4});
  const auto forward = [&](const AttentionOperands& o) {
    return message_of(ErrorKind::kFault,
                      [&] { tiled().forward(Stream(DeviceType::kCpu), o.params, o.q, o.k, o.v, o.out, lse); });
  };
  CHECK(forward(c).empty());
  AttentionOperands o = c;
  o.k.head_dim = 4;
  CHECK(contains(forward(o), "attention_forward: k"));
  o = c;
  o.v.offset += 2 * AttentionCase::kUnused;
  CHECK(contains(forward(o), "attention_forward: heads of v end past the row"));
  using Operand = ops::HeadView AttentionOperands::*;
  for (const Operand apart : {&AttentionOperands::q, &AttentionOperands::out, &AttentionOperands::d_out,
                              &AttentionOperands::d_q, &AttentionOperands::d_k, &AttentionOperands::d_v}) {
    o = c.on_first_keys();
    CHECK(forward(o).empty());
    (o.*apart).group_stride = 0;
    HostTensor delta(DType::kF32, {8, 4});
    const std::string message = message_of(ErrorKind::kFault, [&] {
      tiled().backward(Stream(DeviceType::kCpu), o.params, o.q, o.k, o.v, o.out, lse, o.d_out, delta, o.d_q, o.d_k,
                       o.d_v);
    });
    CHECK(contains(message, "are 0 apart but"));
  }
  o = c;
  o.params.window = -1;
  CHECK(contains(forward(o), "the window is -1"));
}

}  // namespace
}  // namespace invar::test
