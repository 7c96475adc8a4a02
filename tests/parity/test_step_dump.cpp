// The dump of a reference case's first step against what independent code computed, at layouts whose ranks differ.
#include "app/compare_report.h"
#include "app/compare_tensors.h"
#include "app/reference_case.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/hf_weights.h"
#include "comm/thread_communicator.h"
#include "config/validation.h"
#include "parallel/poisoned_weights.h"
#include "support/errors.h"
#include "support/temporary_folder.h"
#include "train/dry_run.h"
#include "train/step_dump.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

struct DumpLayout {
  int tensor = 1;
  bool sequence = false;
  int data = 1;
  int64_t micro_batch = 1;
  bool uneven = false;
  RecomputeKind recompute = RecomputeKind::kNone;
  Precision precision = Precision::kF32;
  // Of each replica, where they are unequal; tensor is then the widest.
  std::vector<int> widths{};
  std::vector<int64_t> samples{};
};

std::filesystem::path dump_first_step(const ReferenceCase& reference, const DumpLayout& layout,
                                      const std::filesystem::path& folder) {
  Config config = reference.config();
  config.parallel.tensor = layout.tensor;
  config.parallel.sequence = layout.sequence;
  config.parallel.data = layout.data;
  config.parallel.uneven = layout.uneven;
  config.train.micro_batch_size = layout.micro_batch;
  config.train.recompute = layout.recompute;
  config.numerics.precision = layout.precision;
  config.log.dir = folder.string();
  config.log.dump_step = 1;
  const Topology topology{layout.tensor, layout.data, layout.widths, layout.samples};
  if (topology.uniform()) validate(config, topology.world());
  std::filesystem::path path;
  run_thread_ranks(topology.world(), [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, topology);
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()), poisoned_weights);
    load_hf_weights(state.parameters(), state.stream(), HfWeights(config.model.hf_path));
    state.adopt_values();
    const auto tokens = reference.tokens();
    const DataStream data{*tokens, Sampler(SampleOrder::kSequential, tokens->samples(), 0)};
    const std::vector<Batch> batches = load_micro_batches(config, groups, data, 0);
    StepDump dump(config, groups, state.model().vocabulary());
    StepHooks hooks;
    hooks.sink = &dump;
    hooks.gradients_complete = [&](const StepResult& result) {
      const std::filesystem::path written = dump.write(state, batches, result, 1);
      if (world.rank() == 0) path = written;
    };
    run_step(state, config, groups, batches, 0, hooks);
  });
  return path;
}

void check_layout(const std::string& name, const DumpLayout& layout) {
  const std::filesystem::path folder = std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference" / name;
  const ReferenceCase reference(folder);
  const TemporaryFolder output;
  const auto dump = open_dump(dump_first_step(reference, layout, output.path()));
  const auto expected = open_safetensors(folder / "expected.safetensors");
  const FileDifference found = compare_tensors(*dump, *expected, {});
  std::string report;
  for (const std::string& line : describe(found, false)) report += line + "\n";
  INFO(name << ", tensor " << layout.tensor << " data " << layout.data << "\n" << report);
  CHECK(found.inside());
  // All but the norm is in both, and nothing else is in the dump.
  CHECK(found.tensors.size() + 1 == dump->names().size());
  CHECK(found.tensors.size() + 3 == expected->names().size());  // not traj_loss, traj_grad_norm, fp32_noise
}

}  // namespace

TEST_CASE("the dump of a step is the reference, at any layout") {
  check_layout("qwen3", {});
  check_layout("qwen3", {.micro_batch = 4});
  check_layout("qwen3", {.tensor = 2, .sequence = true, .data = 2, .micro_batch = 2});
  check_layout("qwen3", {.tensor = 2, .data = 4});
  check_layout("qwen3", {.tensor = 3, .sequence = true, .uneven = true});
  check_layout("qwen3", {.tensor = 3, .data = 2, .uneven = true, .recompute = RecomputeKind::kFull});
  check_layout("qwen3", {.tensor = 8, .sequence = true});  // copies of KV heads
  check_layout("qwen3_untied", {.tensor = 4, .data = 2});
  check_layout("qwen3_batch16", {.tensor = 2, .sequence = true, .data = 4, .micro_batch = 2});
}

TEST_CASE("the dump of a step is the reference if replicas are unequal in width, in their shares or in both") {
  check_layout("qwen3", {.tensor = 2, .data = 2, .widths = {2, 1}, .samples = {3, 1}});
  check_layout("qwen3", {.tensor = 2, .sequence = true, .data = 2, .widths = {1, 2}, .samples = {1, 3}});
  check_layout("qwen3", {.tensor = 2, .data = 2, .widths = {2, 1}, .samples = {2, 2}});
  check_layout("qwen3", {.data = 3, .widths = {1, 1, 1}, .samples = {1, 2, 1}});
  check_layout("qwen3_batch16",
               {.tensor = 4, .sequence = true, .data = 3, .micro_batch = 2, .widths = {4, 2, 3}, .samples = {8, 2, 6}});
}

TEST_CASE("bf16 is outside the band of fp32") {
  const ReferenceCase reference(std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference/qwen3");
  const TemporaryFolder output;
  const auto dump = open_dump(dump_first_step(reference, {.precision = Precision::kBF16}, output.path()));
  const auto expected =
      open_safetensors(std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference/qwen3/expected.safetensors");
  const FileDifference found = compare_tensors(*dump, *expected, {});
  for (const TensorDifference& tensor : found.tensors) {
    const bool is_activation = tensor.name.starts_with("hidden.") || tensor.name == "logits";
    if (is_activation) CHECK(tensor.verdict == Verdict::kOutside);
  }
}

TEST_CASE("a dump says what it is of, and is the same bytes each time") {
  const ReferenceCase reference(std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference/qwen3");
  const TemporaryFolder first, second;
  const DumpLayout layout{.tensor = 2, .sequence = true, .data = 2};
  const std::filesystem::path path = dump_first_step(reference, layout, first.path());
  CHECK(path.filename() == "dump_step_00000001.h5");
  CHECK((read_file(path) == read_file(dump_first_step(reference, layout, second.path()))));
  const Hdf5Reader reader(path);
  CHECK(reader.integer_attribute("step") == 1);
  CHECK(reader.text_attribute("layout") ==
        "tensor 2 with sequence parallelism x data 2, micro-batch 1, recompute none");
  CHECK(reader.text_attribute("precision") == "fp32");
  CHECK(reader.text_attribute("version").has_value());
  CHECK(reader.info("logits").shape == std::vector<int64_t>{4, 32, 250});  // without padding
  CHECK(reader.info("loss").dtype == DType::kF64);
  std::string bytes = read_file(path);  // a value, far from all that HDF5 says of it
  bytes[bytes.size() - 1000] = static_cast<char>(bytes[bytes.size() - 1000] ^ 1);
  write_file(path, bytes);
  require_error(ErrorKind::kData, {path.string(), "checksum"}, [&] { open_dump(path); });
}
