#include <cstdio>
#include <mutex>

#include "app/commands.h"
#include "app/reference_case.h"
#include "comm/thread_communicator.h"
#include "config/resolved.h"
#include "config/validation.h"
#include "config/yaml_loader.h"

namespace invar::app {
namespace {

void print(const std::string& text) {
  std::fputs((text + "\n").c_str(), stdout);
}

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
    if (key.starts_with("parallel.") || key == "train.micro_batch_size" || key == "train.recompute") {
      if (!arguments.matrix) continue;
      throw Error(ErrorKind::kConfig, format("argument {}: --matrix varies {} itself", argument, key),
                  "remove the argument, or --matrix");
    }
    throw Error(ErrorKind::kConfig, format("argument {}: the case fixes {}", argument, key),
                "parity takes parallel.*, numerics.*, train.micro_batch_size, train.recompute and device");
  }
}

std::string describe(const Config& config, int world) {
  return format("tensor {} sequence {} data {} micro-batch {} recompute {}", config.parallel.tensor,
                config.parallel.sequence ? "on " : "off", data_degree(config, world), config.train.micro_batch_size,
                config.train.recompute == RecomputeKind::kFull ? "full" : "none");
}

void print_table(const AgreementTable& table) {
  print(format("{:<34} {:>12} {:>12} {:>10}  verdict", "tensor", "max |error|", "band", "elements"));
  for (const auto& [kind, agreement] : table) {
    const char* verdict =
        agreement.holds() ? "ok" : (agreement.elements != agreement.expected_elements ? "INCOMPLETE" : "OUTSIDE");
    print(format("{:<34} {:>12.3e} {:>12.3e} {:>10}  {}", kind, agreement.worst, agreement.band, agreement.elements,
                 verdict));
  }
}

AgreementTable compare(const ReferenceCase& reference, const Config& config, Communicator& world,
                       const Stream& stream) {
  const Topology topology{config.parallel.tensor, data_degree(config, world.size())};
  return compare_with_reference(reference, config, make_process_groups(world, topology), stream);
}

AgreementTable run_on_threads(const ReferenceCase& reference, const Config& config, int ranks) {
  AgreementTable table;
  const Stream stream(DeviceType::kCpu, threads_per_rank(ranks));
  run_thread_ranks(ranks, [&](Communicator& world) {
    AgreementTable mine = compare(reference, config, world, stream);
    if (world.rank() == 0) table = std::move(mine);
  });
  return table;
}

struct Layout {
  int tensor;
  bool sequence;
  int data;
  int64_t micro_batch;
  RecomputeKind recompute;
  bool uneven;
};

std::vector<Layout> matrix_layouts(int64_t batch) {
  std::vector<Layout> layouts;
  for (const int tensor : {1, 2, 3, 4, 8}) {
    for (const bool sequence : {false, true}) {
      if (sequence && tensor == 1) continue;
      for (const int data : {1, 2, 4}) {
        for (const int64_t micro : {1, 2, 4}) {
          if (tensor * data > 8 || micro * data > batch) continue;
          layouts.push_back({tensor, sequence, data, micro, RecomputeKind::kNone, tensor == 3});
          if (micro == 1) layouts.push_back({tensor, sequence, data, micro, RecomputeKind::kFull, tensor == 3});
        }
      }
    }
  }
  return layouts;
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

int run_matrix(const ReferenceCase& reference, const Config& base) {
  int outside = 0;
  int layouts = 0;
  for (const Layout& layout : matrix_layouts(reference.batch())) {
    Config config = base;
    config.parallel.tensor = layout.tensor;
    config.parallel.sequence = layout.sequence;
    config.parallel.data = layout.data;
    config.parallel.uneven = layout.uneven;
    config.train.micro_batch_size = layout.micro_batch;
    config.train.recompute = layout.recompute;
    const int ranks = layout.tensor * layout.data;
    validate(config, ranks);
    const AgreementTable table = run_on_threads(reference, config, ranks);
    std::string kind;
    const double share = worst_share(table, kind);
    const bool holds = all_hold(table);
    print(format("{}  {:<8} worst {:5.2f} of its band ({})", describe(config, ranks), holds ? "ok" : "OUTSIDE", share,
                 kind));
    ++layouts;
    outside += holds ? 0 : 1;
  }
  print(format("{} layouts, {} outside the band", layouts, outside));
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
    check_device(config);
    if (!arguments.matrix) validate(config, ranks);
  });
  if (arguments.matrix) return run_matrix(*reference, config);

  AgreementTable table;
  if (arguments.thread_ranks > 0) {
    table = run_on_threads(*reference, config, ranks);
  } else {
    const Stream stream(DeviceType::kCpu, threads_per_rank(session.local_size()));
    table = compare(*reference, config, world, stream);
  }
  if (world.rank() == 0) {
    print(format("{} on {} ranks: {}", arguments.case_dir, ranks, describe(config, ranks)));
    print_table(table);
  }
  return all_hold(table) ? 0 : 1;
}

}  // namespace invar::app
