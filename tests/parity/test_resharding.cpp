// A checkpoint saved at one layout, loaded at another and saved again holds the same logical tensors, bit for bit.
#include <bit>
#include <map>

#include "awkward_models.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_saver.h"
#include "comm/thread_communicator.h"
#include "parallel/poisoned_weights.h"
#include "support/errors.h"
#include "support/hdf5_library.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"
#include "train/dry_run.h"
#include "train/step.h"

using namespace invar;
using namespace invar::test;

namespace {

std::string name_of(const Layout& layout) {
  std::string widths;
  for (const int width : layout.widths) widths += format("_{}", width);
  return format("tp{}{}_dp{}{}", layout.tensor, layout.sequence ? "sp" : "", layout.data, widths);
}

const std::vector<Layout> kLayouts = {{1, false, 1},
                                      {2, true, 1},
                                      {4, false, 1},
                                      {1, false, 2},
                                      {2, false, 2},
                                      {8, true, 1},
                                      nonuniform({4, 3}, {2, 2}, true, 1),
                                      nonuniform({1, 6}, {1, 3}, false, 1)};

// Heads for TP=8; keys and values of fewer heads are then copied.
Config with_more_heads(Config config) {
  config.model.num_attention_heads = 8;
  config.model.num_key_value_heads = config.model.family == "gemma4" ? 2 : 4;
  config.model.intermediate_size = 140;
  config.model.vocab_size = 131;
  config.train.steps = 2;
  config.train.global_batch_size = 4;
  return config;
}
Config qwen3(Precision precision) {
  return with_more_heads(awkward_model(precision));
}
Config gemma4(Precision precision) {
  return with_more_heads(awkward_gemma4(precision));
}

// Runs body(state, groups, data) on every rank of a layout.
using Body = std::function<void(TrainState&, const ProcessGroups&, const Config&)>;
void on_ranks(Config config, const Layout& layout, const Body& body) {
  use_layout(config, layout);
  run_thread_ranks(layout.topology().world(), [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, layout.topology());
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()), poisoned_weights);
    body(state, groups, config);
  });
}

void train_steps(TrainState& state, const ProcessGroups& groups, const Config& config) {
  initialise(state.parameters(), state.stream(), config.train.seed, config.model.initializer_range);
  state.adopt_values();
  const auto source = make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()));
  const DataStream data = data_stream(*source, config, Split::kTrain);
  for (int64_t step = 0; step < config.train.steps; ++step) {
    run_step(state, config, groups, load_micro_batches(config, groups, data, step), step);
  }
}

void save(const TrainState& state, const ProcessGroups& groups, const std::filesystem::path& folder, bool async) {
  CheckpointSaver::Options options;
  options.async = async;
  CheckpointSaver saver(*groups.world, state.stream(), folder, options);
  CheckpointInfo info;
  info.step = 2;
  const std::optional<SaveResult> earlier = saver.save(info, [&] { return state.own_part(); });
  CHECK(!earlier.has_value());
  const SaveResult result = saver.wait().value();
  CHECK(result.failure.empty());
  CHECK(result.step == 2);
}

using Tensors = std::map<std::string, std::vector<uint32_t>>;  // bits

Tensors logical_tensors(const std::filesystem::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  Tensors all;
  for (const StateTensor& tensor : reader.index().tensors) {
    std::vector<float> values(static_cast<size_t>(tensor.rows() * tensor.cols()));
    reader.read_rows(tensor.name, {0, tensor.rows()}, values);
    std::vector<uint32_t>& bits = all[tensor.name];
    for (const float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  }
  return all;
}

// What h5py reads: the virtual dataset of the index.
std::vector<float> read_virtual(const std::filesystem::path& checkpoint, const std::string& tensor) {
  return read_by_library(checkpoint / "index.h5", tensor);
}

bool has_values(const Tensors& tensors) {
  for (const auto& [name, bits] : tensors) {
    // Gemma's layer scalars and padding rows aside, no tensor is all zeros after training.
    if (std::all_of(bits.begin(), bits.end(), [](uint32_t x) { return x == 0; })) return false;
  }
  return !tensors.empty();
}

void check_all_pairs(const Config& config) {
  const TemporaryFolder folder;
  for (const Layout& from : kLayouts) {
    const std::filesystem::path saved = folder / name_of(from);
    on_ranks(config, from, [&](TrainState& state, const ProcessGroups& groups, const Config& run) {
      train_steps(state, groups, run);
      save(state, groups, saved, true);
    });
    const Tensors expected = logical_tensors(find_checkpoint(saved));
    CHECK(has_values(expected));
    for (const Layout& to : kLayouts) {
      INFO(name_of(from) << " -> " << name_of(to));
      const std::filesystem::path again = folder / (name_of(from) + "_" + name_of(to));
      on_ranks(config, to, [&](TrainState& state, const ProcessGroups& groups, const Config&) {
        state.load(CheckpointReader(find_checkpoint(saved)));
        save(state, groups, again, false);
      });
      CHECK(logical_tensors(find_checkpoint(again)) == expected);
    }
  }
}

}  // namespace

TEST_CASE("Qwen3: saved at any layout, loaded at any layout, the same tensors") {
  check_all_pairs(qwen3(Precision::kF32));
}

TEST_CASE("Gemma 4: saved at any layout, loaded at any layout, the same tensors") {
  check_all_pairs(gemma4(Precision::kF32));
}

TEST_CASE("bf16: masters and moments keep their fp32 bits, and the weights are the rounded masters") {
  const Config config = gemma4(Precision::kBF16);
  const TemporaryFolder folder;
  std::vector<std::vector<float>> weights(2);  // of rank 0, before and after
  on_ranks(config, {2, true, 2}, [&](TrainState& state, const ProcessGroups& groups, const Config& run) {
    train_steps(state, groups, run);
    save(state, groups, folder / "a", true);
    const Tensor& values = state.parameters().flat_values();
    if (groups.world->rank() == 0) {
      for (int64_t i = 0; i < values.numel(); ++i) weights[0].push_back(static_cast<float>(values.data<BF16>()[i]));
    }
  });
  on_ranks(config, {2, true, 2}, [&](TrainState& state, const ProcessGroups& groups, const Config&) {
    state.load(CheckpointReader(find_checkpoint(folder / "a")));
    save(state, groups, folder / "b", true);
    const Tensor& values = state.parameters().flat_values();
    if (groups.world->rank() == 0) {
      for (int64_t i = 0; i < values.numel(); ++i) weights[1].push_back(static_cast<float>(values.data<BF16>()[i]));
    }
  });
  CHECK(logical_tensors(find_checkpoint(folder / "b")) == logical_tensors(find_checkpoint(folder / "a")));
  CHECK(weights[0] == weights[1]);
}

TEST_CASE("A file holds what memory held: masters and both moments under their own names") {
  const TemporaryFolder folder;
  std::map<std::string, std::vector<float>> memory;  // of the embedding
  const std::string embedding = "model.embed_tokens.weight";
  on_ranks(qwen3(Precision::kF32), {1, false, 1},
           [&](TrainState& state, const ProcessGroups& groups, const Config& run) {
             train_steps(state, groups, run);
             save(state, groups, folder / "a", true);
             const Weight& weight = state.parameters().weights().front();
             REQUIRE(weight.parameters.front().name == embedding);
             for (const AdamW::OwnState& own : state.optimizer().own_states()) {
               if (&state.parameters().weight(own.weight) != &weight) continue;
               const auto take = [&](const std::string& kind, const Tensor& values) {
                 memory[kind + embedding].assign(values.data<float>(), values.data<float>() + 131 * 40);
               };
               take("model/", own.master);
               take("optimizer/exp_avg/", own.exp_avg);
               take("optimizer/exp_avg_sq/", own.exp_avg_sq);
             }
           });
  REQUIRE(memory.size() == 3);
  const CheckpointReader reader(find_checkpoint(folder / "a"));
  for (const auto& [name, expected] : memory) {
    std::vector<float> values(expected.size());
    reader.read_rows(name, {0, 131}, values);
    CHECK(values == expected);
  }
  on_ranks(qwen3(Precision::kF32), {1, false, 1}, [&](TrainState& state, const ProcessGroups&, const Config&) {
    state.load(reader);
    for (const AdamW::OwnState& own : state.optimizer().own_states()) {
      if (state.parameters().weight(own.weight).parameters.front().name != embedding) continue;
      const float* loaded = own.exp_avg_sq.data<float>();
      CHECK(std::equal(loaded, loaded + 131 * 40, memory["optimizer/exp_avg_sq/" + embedding].begin()));
    }
  });
}

TEST_CASE("The index shows each tensor whole, as its virtual dataset") {
  const TemporaryFolder folder;
  on_ranks(gemma4(Precision::kF32), {4, true, 2},
           [&](TrainState& state, const ProcessGroups& groups, const Config& run) {
             train_steps(state, groups, run);
             save(state, groups, folder / "a", true);
           });
  const std::filesystem::path checkpoint = find_checkpoint(folder / "a");
  for (const auto& [name, expected] : logical_tensors(checkpoint)) {
    INFO(name);
    std::vector<uint32_t> bits;
    for (const float value : read_virtual(checkpoint, name)) bits.push_back(std::bit_cast<uint32_t>(value));
    CHECK(bits == expected);
  }
}

TEST_CASE("A dropped or doubled run of rows is noticed") {
  const TemporaryFolder folder;
  on_ranks(qwen3(Precision::kF32), {2, false, 1},
           [&](TrainState& state, const ProcessGroups& groups, const Config& run) {
             train_steps(state, groups, run);
             CheckpointSaver saver(*groups.world, state.stream(), folder / "a", {});
             StatePart part = state.own_part();
             if (groups.world->rank() == 1) part.runs.pop_back();
             saver.save({}, [&] { return part; });
             const SaveResult result = saver.wait().value();
             CHECK(contains(result.failure, "written, its shape is"));
           });
  CHECK(RunDirectory(folder / "a").steps().empty());
}
