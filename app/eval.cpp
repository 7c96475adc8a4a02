#include <algorithm>
#include <array>
#include <optional>

#include "app/commands.h"
#include "app/console.h"
#include "app/rank_device.h"
#include "app/training_ranks.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/run_directory.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "data/document_end.h"
#include "observe/console.h"
#include "parallel/check_inputs.h"
#include "train/dry_run.h"
#include "train/run_inputs.h"
#include "train/step.h"

namespace invar::app {
namespace {

// What an evaluation does not depend on would be ignored, and another model is none of this checkpoint.
void refuse_without_use(const std::vector<std::string>& overrides) {
  constexpr std::array kUsed = {"comm.",
                                "parallel.",
                                "data.",
                                "device=",
                                "numerics.precision=",
                                "numerics.reduction=",
                                "train.eval_batches=",
                                "train.global_batch_size=",
                                "train.micro_batch_size=",
                                "train.sequence_length="};
  for (const std::string& override : overrides) {
    if (std::any_of(kUsed.begin(), kUsed.end(), [&](const char* key) { return override.starts_with(key); })) continue;
    throw Error(
        ErrorKind::kConfig, format("argument {}: an evaluation has no use for it", override),
        "parallel, comm, data, device, numerics.precision and reduction, train.eval_batches, global_batch_size, "
        "micro_batch_size and sequence_length may be given");
  }
}

// A run needs none, an evaluation does: what to pass to it is said, not what to set for the run.
void check_validation_data(const Config& config, const CheckpointReader& reader) {
  if (has_validation_data(config)) return;
  const bool is_megatron = config.data.kind == DataKind::kMegatron;
  throw Error(
      ErrorKind::kConfig,
      format("{}: its run kept no validation data ({})", reader.folder().string(),
             is_megatron ? format("data.split = \"{}\"", config.data.split) : "data.validation_fraction = 0"),
      format(
          "pass {}, which takes the last 5 % of the data that it was trained on, or data.path as well, for other data",
          is_megatron ? "data.split=\"95, 5, 0\"" : "data.validation_fraction=0.05"));
}

// The saved config without what only a training run has, so that nothing in it is out of place here.
Config eval_config(const CheckpointReader& reader, const std::vector<std::string>& overrides, int world_size,
                   std::span<const HostSlot> hosts) {
  refuse_without_use(overrides);
  Config config = load_config_text(reader.info().config, "config of " + reader.folder().string());
  config.checkpoint = {};
  config.comm = {};
  config.log = {};
  config.parallel = {};
  config.train.micro_batch_size = 1;
  config.train.exit_after_minutes = 0;
  config.train.exit_after_steps = 0;
  config.train.steps = std::max<int64_t>(1, config.train.steps);  // imported weights have none
  config.train.eval_every = std::max<int64_t>(1, config.train.eval_every);
  // Before a run settled it, auto was the last token of the vocabulary.
  const bool documents = config.data.reset_at_eod || config.data.eod_mask_loss;
  if (documents && config.data.eod_id < 0) config.data.eod_id = config.model.vocab_size - 1;
  apply_overrides(config, overrides);
  check_validation_data(config, reader);
  if (config.numerics.reduction == Reduction::kFast) config.numerics = {config.numerics.precision, Reduction::kFast};
  if (config.numerics.reduction == Reduction::kInvariant) {  // as few as fit: an evaluation sums exactly
    const ParallelConfig& parallel = config.parallel;
    config.numerics.workers = has_nonuniform(config) ? std::max<int64_t>(1, config.train.global_batch_size)
                                                     : reader_degree(config, world_size - parallel.spare);
  }
  validate(config, world_size, hosts);
  settle_eod_id(config);
  return config;
}

// Of the ranks that compute.
void evaluate(const EvalArguments& arguments, const Config& config, const CheckpointReader& reader,
              TrainingRanks& ranks, MpiSession& session) {
  Communicator& world = ranks.world();
  std::unique_ptr<TokenSource> source;
  std::vector<InputPrint> inputs;
  together(world, [&] {
    source = make_token_source(config.data, token_request(config, Split::kValidation, world.size()));
    inputs = run_inputs(*source, "", reader.folder());
  });
  const int64_t step = reader.info().step;
  const int64_t least = all_reduce_value(world, step, ReduceOp::kMin);
  if (least != all_reduce_value(world, step, ReduceOp::kMax)) {
    throw Error(ErrorKind::kData, format("{}: the latest checkpoint changed meanwhile", arguments.path),
                "try again, or name one checkpoint");
  }
  check_inputs(inputs, world);
  const Topology topology = topology_of(ranks.plan());
  const RankDevice device = open_device(config, session, world);
  const ProcessGroups groups = make_process_groups(*device.world, topology);
  TrainState state(config, groups, device.stream,
                   measure_memory(config, topology, world.rank(), device.stream.device()));
  state.load(reader);
  const DataStream data = data_stream(*source, config, Split::kValidation);
  const Evaluation result = run_evaluation(state, config, groups, data).value();
  if (world.rank() == 0) print_line(format("{}: {}", reader.folder().string(), source->describe()));
  for (const std::string& warning : source->warnings()) print_line("warning: " + warning);  // of whichever rank
  together(world, [&] {  // what was asked for does not exist, and no script should go on without it
    if (result.loss) return;
    throw Error(
        ErrorKind::kData,
        format("no validation loss: of {} samples no token counts, as data.eod_mask_loss leaves out those after "
               "data.eod_id = {}",
               result.samples, config.data.eod_id),
        "set data.eod_id to the tokenizer's end of a document, or data.eod_mask_loss: false");
  });
  if (world.rank() == 0) {
    print_line(console_line(EvaluationMetrics{step, config.train.steps, result.loss, result.samples}));
  }
  world.barrier();
}

}  // namespace

int eval(const EvalArguments& arguments, MpiSession& session) {
  const std::vector<HostSlot> hosts = gather_hosts(session);
  Communicator& job = session.world();
  std::optional<CheckpointReader> reader;
  Config config;
  together(job, [&] {
    reader.emplace(find_checkpoint(arguments.path));
    config = eval_config(*reader, arguments.overrides, job.size(), hosts);
  });
  TrainingRanks ranks(config, session, hosts);
  if (ranks.idle()) return ranks.wait_for_the_others(session);
  try {
    evaluate(arguments, config, *reader, ranks, session);
  } catch (const SetupError&) {  // on all of them, and the idle ones would sleep on
    ranks.wait_for_the_others(session);
    throw;
  } catch (const ReportedElsewhere&) {
    ranks.wait_for_the_others(session);
    throw;
  }
  return ranks.wait_for_the_others(session);
}

}  // namespace invar::app
