#include "app/commands.h"
#include "app/console.h"
#include "app/layout_matrix.h"
#include "app/rank_device.h"
#include "app/reference_case.h"
#include "comm/thread_communicator.h"
#include "config/field.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"
#include "parallel/poisoned_weights.h"

namespace invar::app {
namespace {

void check_mode(const ParityArguments& arguments, int world) {
  const bool on_threads = arguments.thread_ranks > 0;
  if (world > 1 && (on_threads || arguments.matrix)) {
    throw Error(ErrorKind::kConfig, "--thread-ranks and --matrix run in one process", "start it without mpirun");
  }
  if (on_threads && arguments.matrix) {
    throw Error(ErrorKind::kConfig, "--matrix chooses the ranks of each layout itself", "remove --thread-ranks");
  }
}

// What a case fixes may not be overridden: the comparison would mean nothing. Nor what the matrix varies.
void refuse_fixed_keys(const ParityArguments& arguments) {
  for (const std::string& argument : arguments.overrides) {
    const std::string key = argument.substr(0, argument.find('='));
    if (key.starts_with("numerics.") || key == "device") continue;
    if (key.starts_with("comm.")) {
      if (!arguments.matrix && arguments.thread_ranks == 0) continue;
      throw Error(ErrorKind::kConfig,
                  format("argument {}: ranks are threads here, which move messages in memory", argument),
                  "remove the argument, or start parity under mpirun");
    }
    if (key.starts_with("parallel.") || key == "train.micro_batch_size" || key == "train.recompute") {
      if (!arguments.matrix) continue;
      throw Error(ErrorKind::kConfig, format("argument {}: --matrix varies {} itself", argument, key),
                  "remove the argument, or --matrix");
    }
    throw Error(ErrorKind::kConfig, format("argument {}: the case fixes {}", argument, key),
                "parity takes parallel.*, numerics.*, comm.*, train.micro_batch_size, train.recompute and device");
  }
}

void refuse_other_ranks_or_batch(const Config& config, int ranks) {
  const ReplicaPlan plan = plan_replicas(config, ranks);
  if (plan.batch() != config.train.global_batch_size) {
    throw Error(ErrorKind::kConfig, "parallel.nonuniform.batch = shrink: the case fixes the batch", "use keep");
  }
  const int training = plan.training_ranks();
  if (training == ranks) return;
  throw Error(
      ErrorKind::kConfig, format("{} of {} ranks would be idle", ranks - training, ranks),
      "give parity no spare or failed ranks; parallel.nonuniform.tensor_widths cuts the replicas as failures do");
}

std::string describe(const Config& config, int world) {
  if (const Topology topology = topology_of(plan_replicas(config, world)); !topology.uniform()) {
    return format("{} micro-batch {}", topology.describe(config.parallel.sequence), config.train.micro_batch_size);
  }
  return format("tensor {} sequence {} data {} micro-batch {} recompute {}", config.parallel.tensor,
                config.parallel.sequence ? "on " : "off", replica_degree(config, world), config.train.micro_batch_size,
                word_of(config.train.recompute));
}

void print_table(const AgreementTable& table) {
  print_line(format("{:<34} {:>12} {:>12} {:>10}  verdict", "tensor", "max |error|", "band", "elements"));
  for (const auto& [kind, agreement] : table) {
    print_line(format("{:<34} {:>12.3e} {:>12.3e} {:>10}  {}", kind, agreement.worst, agreement.band,
                      agreement.elements, agreement.verdict()));
  }
}

AgreementTable compare(const ReferenceCase& reference, const Config& config, Communicator& world, const Stream& stream,
                       bool poison) {
  const Topology topology = topology_of(plan_replicas(config, world.size()));
  Intervention intervention;
  if (poison) intervention.weights = poisoned_weights;
  return compare_with_reference(reference, config, make_process_groups(world, topology), stream, intervention);
}

AgreementTable run_on_threads(const ReferenceCase& reference, const Config& config, int ranks, bool poison) {
  AgreementTable table;
  run_thread_ranks(ranks, [&](Communicator& world) {
    const RankDevice device = open_thread_device(config, world, threads_per_rank(ranks));
    AgreementTable mine = compare(reference, config, *device.world, device.stream, poison);
    if (world.rank() == 0) table = std::move(mine);
  });
  return table;
}

double worst_share(const AgreementTable& table, std::string& kind) {
  double worst = -1;
  for (const auto& [name, agreement] : table) {
    const double share = agreement.holds() || agreement.worst > agreement.band ? agreement.worst / agreement.band : 1e9;
    if (share > worst) {
      worst = share;
      kind = name;
    }
  }
  return worst;
}

int run_matrix(const ReferenceCase& reference, const Config& base, bool poison) {
  const LayoutMatrix matrix = layout_matrix(base, reference.batch(), reference.sequence_length());
  int outside = 0;
  for (const Layout& layout : matrix.layouts) {
    Config config = base;
    layout.apply_to(config);
    validate(config, layout.ranks());
    const AgreementTable table = run_on_threads(reference, config, layout.ranks(), poison);
    std::string kind;
    const double share = worst_share(table, kind);
    const bool holds = all_hold(table);
    print_line(format("{}  {:<8} worst {:5.2f} of its band ({})", describe(config, layout.ranks()),
                      holds ? "ok" : "OUTSIDE", share, kind));
    outside += holds ? 0 : 1;
  }
  for (const auto& [reason, count] : matrix.left_out) print_line(format("left out {:>3}: {}", count, reason));
  print_line(format("{} layouts, {} outside the band", matrix.layouts.size(), outside));
  return outside == 0 ? 0 : 1;
}

}  // namespace

int parity(const ParityArguments& arguments, MpiSession& session) {
  Communicator& world = session.world();
  std::unique_ptr<ReferenceCase> reference;
  Config config;
  const int ranks = arguments.thread_ranks > 0 ? arguments.thread_ranks : world.size();
  together(world, [&] {
    check_mode(arguments, world.size());
    refuse_fixed_keys(arguments);
    reference = std::make_unique<ReferenceCase>(arguments.case_dir);
    config = reference->config();
    apply_overrides(config, arguments.overrides);
    choose_device(config);
    validate(config, ranks);  // before a matrix: its first layout
    refuse_other_ranks_or_batch(config, ranks);
  });
  if (arguments.matrix) return run_matrix(*reference, config, arguments.poison_weights);

  AgreementTable table;
  if (arguments.thread_ranks > 0) {
    table = run_on_threads(*reference, config, ranks, arguments.poison_weights);
  } else {
    const RankDevice device = open_device(config, session, world);
    table = compare(*reference, config, *device.world, device.stream, arguments.poison_weights);
  }
  if (world.rank() == 0) {
    print_line(format("{} on {} ranks: {}", arguments.case_dir, ranks, describe(config, ranks)));
    print_table(table);
  }
  return all_hold(table) ? 0 : 1;
}

}  // namespace invar::app
