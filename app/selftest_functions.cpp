#include <bit>

#include "app/selftest.h"
#include "observe/state_hash.h"
#include "ops/block_hashes.h"
#include "ops/cross_entropy.h"
#include "ops/gated_activation.h"
#include "ops/norm.h"

namespace invar::app {
namespace {

constexpr int64_t kInputs = int64_t{1} << 20;

// Of f32 results, as the hash of a state is made.
std::string hash_of(const Bench& bench, const Tensor& tensor) {
  std::vector<float> results;
  for (const uint32_t bits : bench.bits(tensor)) results.push_back(std::bit_cast<float>(bits));
  const int64_t count = std::ssize(results);
  std::vector<int64_t> blocks(static_cast<size_t>(hash_blocks(count)));
  const ops::HashedRows all{{0, count}, {0, 1, 1, 0}};
  ops::add_block_hashes(Stream(DeviceType::kCpu), view_of(results).view({count, 1}), {&all, 1}, view_of(blocks));
  return hash_text(hash_tensor(blocks));
}

// A hash that is known is checked; of GPUs, whose functions are CUDA's, it is told.
class Functions {
 public:
  Functions(SelftestReport& report, const Bench& bench, bool known) : report_(report), bench_(bench), known_(known) {}

  void look_at(const std::string& name, const Tensor& results, const std::string& of_cpus) {
    const std::string hash = hash_of(bench_, results);
    if (!known_) return report_.tell("hash of " + name, hash);
    report_.check(name + " over 2^20 inputs",
                  [&] { return hash == of_cpus ? "" : format("hash {} instead of {}", hash, of_cpus); });
  }

 private:
  SelftestReport& report_;
  const Bench& bench_;
  bool known_;
};

}  // namespace

void check_functions(SelftestReport& report, const Stream& stream) {
  Bench bench(stream);
  Functions functions(report, bench, stream.device() == DeviceType::kCpu);
  const std::vector<float> inputs = Matrix(1, kInputs, 7, 6).values;
  const Tensor gate = bench.filled(DType::kF32, {kInputs, 1}, inputs);
  const Tensor ones = bench.filled(DType::kF32, {kInputs, 1}, std::vector<float>(inputs.size(), 1.0f));
  const Tensor out = bench.unwritten(DType::kF32, {kInputs, 1});
  ops::gate_forward(stream, ops::Activation::kSilu, gate, ones, out);
  functions.look_at("exp (SiLU)", out, "dc7837735c4b93e7");
  ops::gate_forward(stream, ops::Activation::kGeluTanh, gate, ones, out);
  functions.look_at("exp (GELU)", out, "e16bf4bcf6128119");

  const Tensor logits = gate.view({kInputs / 64, 64});
  const Tensor labels = bench.filled(DType::kI32, {kInputs / 64}, std::vector<float>(inputs.size() / 64, 5.0f));
  std::vector<Tensor> of_rows;
  for (int i = 0; i < 4; ++i) of_rows.push_back(bench.unwritten(DType::kF32, {kInputs / 64}));
  ops::logits_statistics(stream, logits, {0, 64}, labels, {0, 64}, 64, of_rows[0], of_rows[1], of_rows[2]);
  functions.look_at("exp (sums of the cross entropy)", of_rows[1], "bbebfd53e1ab3e8c");
  ops::token_losses(stream, labels, of_rows[0], of_rows[1], of_rows[2], of_rows[3]);
  functions.look_at("log (losses)", of_rows[3], "b85cfd239b7f81a5");

  const Tensor x = gate.view({kInputs / 4, 4});
  const Tensor y = bench.unwritten(DType::kF32, {kInputs / 4, 4});
  const Tensor rstd = bench.unwritten(DType::kF32, {kInputs / 4});
  ops::rms_norm_forward(stream, x, ones.view({kInputs}).rows(0, 4), 1e-6f, y, rstd);
  functions.look_at("rsqrt (RMSNorm)", rstd, "4430c9cce7c82168");
  ops::softcap(stream, 30.0f, gate);
  functions.look_at("tanh (softcap)", gate, "2827c98a2375c3d2");
}

}  // namespace invar::app
