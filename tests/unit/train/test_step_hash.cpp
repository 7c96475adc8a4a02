#include "train/step_hash.h"

#include <algorithm>
#include <limits>

#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/hdf5_file.h"
#include "comm/thread_communicator.h"
#include "parallel/logical_tensor.h"
#include "small_model.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"
#include "train/dry_run.h"

using namespace invar;
using namespace invar::test;

namespace {

struct Layout {
  int tensor = 1;
  int data = 1;
};
// Copies of norms at tensor 2, of KV heads too at 4.
const std::vector<Layout> kLayouts = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}, {4, 3}};

using Body = std::function<void(TrainState&, const ProcessGroups&, const Config&)>;
void on_ranks(const Layout& layout, const Body& body, Precision precision = Precision::kF32) {
  Config config = small_model(2);
  config.parallel.tensor = layout.tensor;
  config.parallel.data = layout.data;
  config.numerics.precision = precision;
  config.train.steps = 3;
  config.train.global_batch_size = 6;
  run_thread_ranks(layout.tensor * layout.data, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {layout.tensor, layout.data});
    const Stream stream(DeviceType::kCpu);
    TrainState state(config, groups, stream, measure_memory(config, groups.topology, world.rank()));
    initialise(state.parameters(), stream, config.train.seed, config.model.initializer_range);
    state.adopt_values();
    body(state, groups, config);
  });
}

// Trains the steps; the hash of the last one.
StateHash train_steps(TrainState& state, const ProcessGroups& groups, const Config& config, StateDigest& digest) {
  const auto source = make_token_source(config.data, token_request(config, Split::kTrain, groups.world->size()));
  const DataStream data = data_stream(*source, config, Split::kTrain);
  StateHash last;
  for (int64_t step = 0; step < config.train.steps; ++step) {
    StepHash hash(state, groups);
    StepHooks hooks;
    hooks.gradients_complete = [&](const StepResult&) { hash.gradients(); };
    const StepResult result =
        run_step(state, config, groups, load_micro_batches(config, groups, data, step), step, hooks);
    last = hash.finish();
    digest = last.digest(result.loss, result.grad_norm);
  }
  return last;
}

void save(const TrainState& state, const ProcessGroups& groups, const std::filesystem::path& folder) {
  CheckpointSaver saver(*groups.world, state.stream(), folder, {});
  CheckpointInfo info;
  info.step = 3;
  (void)saver.save(info, [&] { return state.own_part(); });
  CHECK(saver.wait().value().failure.empty());
}

std::vector<uint64_t> hashes_of(const std::vector<TensorHash>& tensors) {
  std::vector<uint64_t> hashes;
  for (const TensorHash& tensor : tensors) hashes.push_back(tensor.hash());
  return hashes;
}

// Gradients that are a function of name and place in the logical tensor; `odd`: one element of one rank is not.
std::vector<uint64_t> made_up_gradients(const Layout& layout, bool odd) {
  std::vector<uint64_t> hashes;
  on_ranks(layout, [&](TrainState& state, const ProcessGroups& groups, const Config&) {
    const Tensor& flat = state.parameters().flat_gradients();
    std::fill_n(flat.data<float>(), flat.numel(), 1e9f);  // padding is none of the state
    state.parameters().for_each_run(
        [&](const Weight& weight, const Parameter& parameter, const RowRun& run, Range elements) {
          for (int64_t i = 0; i < elements.size(); ++i) {
            const int64_t at = parameter.logical_index(run.global.begin + i / weight.cols, i % weight.cols);
            flat.data<float>()[elements.begin + i] =
                static_cast<float>(at) + static_cast<float>(parameter.name.size()) / 64;
          }
        });
    if (odd && groups.world->rank() == 0) {
      flat.data<float>()[state.ownership().pieces().front().elements.begin] += 1;
    }
    const std::vector<uint64_t> found = hashes_of(hash_state(state, groups, StateKind::kGradients));
    if (groups.world->rank() == 0) hashes = found;
  });
  return hashes;
}

}  // namespace

TEST_CASE("A state has the same hashes at every layout that it is loaded to") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const TemporaryFolder folder;
    StateHash saved;
    on_ranks(
        {1, 1},
        [&](TrainState& state, const ProcessGroups& groups, const Config& config) {
          StateDigest digest;
          saved = train_steps(state, groups, config, digest);
          save(state, groups, folder / "c");
        },
        precision);
    for (const Layout& layout : kLayouts) {
      INFO("tensor " << layout.tensor << " data " << layout.data);
      on_ranks(
          layout,
          [&](TrainState& state, const ProcessGroups& groups, const Config&) {
            const auto fresh = hash_state(state, groups, StateKind::kWeights);
            CHECK(hashes_of(fresh) != hashes_of(saved.of(StateKind::kWeights)));
            state.load(CheckpointReader(RunDirectory(folder / "c").latest().value()));
            for (const StateKind kind : {StateKind::kWeights, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
              const auto found = hash_state(state, groups, kind);
              CHECK(hashes_of(found) == hashes_of(saved.of(kind)));
            }
          },
          precision);
    }
  }
}

TEST_CASE("Gradients have the same hashes at every layout; one odd element changes one tensor") {
  const std::vector<uint64_t> expected = made_up_gradients({1, 1}, false);
  for (const Layout& layout : kLayouts) {
    INFO("tensor " << layout.tensor << " data " << layout.data);
    CHECK(made_up_gradients(layout, false) == expected);
    const std::vector<uint64_t> odd = made_up_gradients(layout, true);
    REQUIRE(odd.size() == expected.size());
    int64_t differing = 0;
    for (size_t i = 0; i < odd.size(); ++i) differing += odd[i] != expected[i];
    CHECK(differing == 1);
  }
}

TEST_CASE("Equal runs have equal hashes, steps do not, and a step left out keeps its state") {
  StateDigest digests[2];
  for (StateDigest& digest : digests) {
    on_ranks({2, 2}, [&](TrainState& state, const ProcessGroups& groups, const Config& config) {
      StateDigest found;
      train_steps(state, groups, config, found);
      if (groups.world->rank() == 0) digest = found;
    });
  }
  CHECK(digests[0].combined == digests[1].combined);
  on_ranks({2, 1}, [&](TrainState& state, const ProcessGroups& groups, const Config& config) {
    StateDigest first, after;
    const StateHash trained = train_steps(state, groups, config, first);
    const Tensor& values = state.parameters().weights().front().value;
    std::fill_n(values.data<float>(), values.numel(), std::numeric_limits<float>::quiet_NaN());
    const auto before = hashes_of(hash_state(state, groups, StateKind::kWeights));
    StateHash left_out = train_steps(state, groups, config, after);
    CHECK(hashes_of(left_out.of(StateKind::kWeights)) == before);
    CHECK(first.kinds[0] != after.kinds[0]);  // the NaN
    CHECK(first.kinds[1] == after.kinds[1]);
    CHECK(first.kinds[2] == after.kinds[2]);
    CHECK(first.kinds[3] != after.kinds[3]);
  });
}

TEST_CASE("The hashes of blocks are written with the shapes of their tensors") {
  const TemporaryFolder folder;
  on_ranks({2, 1}, [&](TrainState& state, const ProcessGroups& groups, const Config& config) {
    StateDigest digest;
    const StateHash hash = train_steps(state, groups, config, digest);
    if (groups.world->rank() != 0) return;
    write_block_hashes(folder.path(), 3, hash);
    write_block_hashes(folder.path(), 3, hash);  // again, after the run went back
    const Hdf5Reader reader(folder / "hash_step_00000003.h5");
    CHECK(reader.integer_attribute("step") == 3);
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      for (const TensorHash& tensor : hash.tensors[kind]) {
        std::vector<int64_t> blocks(tensor.blocks.size()), shape(tensor.shape.size());
        reader.read_rows<int64_t>(format("{}/{}", kStateKindNames[kind], tensor.name), {0, std::ssize(blocks)}, blocks);
        reader.read_rows<int64_t>("shape/" + tensor.name, {0, std::ssize(shape)}, shape);
        CHECK(blocks == tensor.blocks);
        CHECK(shape == tensor.shape);
      }
    }
    std::string bytes = folder.read("hash_step_00000003.h5");
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    folder.write("hash_step_00000003.h5", bytes);
    require_error(ErrorKind::kData, {"hash_step_00000003.h5", "checksum"},
                  [&] { Hdf5Reader damaged(folder / "hash_step_00000003.h5"); });
  });
}
