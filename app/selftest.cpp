#include "app/selftest.h"

#include <cstdio>

#include "app/commands.h"
#include "app/console.h"
#include "app/rank_device.h"
#include "config/yaml_loader.h"
#include "core/format.h"

namespace invar::app {
namespace {

constexpr const char* kLine = "{:<90} {}";

DeviceChoice chosen_device(const SelftestArguments& arguments) {
  for (const std::string& argument : arguments.overrides) {
    if (argument.starts_with("device=")) continue;
    throw Error(ErrorKind::kConfig, format("argument {}: selftest has models of its own", argument),
                "selftest takes device and --steps");
  }
  Config config;
  apply_overrides(config, arguments.overrides);
  return config.device;
}

}  // namespace

void SelftestReport::check(const std::string& name, const std::function<std::string()>& difference) {
  std::string found;
  try {
    found = difference();
  } catch (const Error& error) {
    found = error.what();
  }
  ++checks_;
  failed_ += found.empty() ? 0 : 1;
  tell(name, found.empty() ? "ok" : format("FAILED ({})", found));
}

void SelftestReport::tell(const std::string& name, const std::string& text) const {
  print_line(format(kLine, name, text));
  std::fflush(stdout);
}

int selftest(const SelftestArguments& arguments, MpiSession& session) {
  Config config;
  together(session.world(), [&] {
    if (session.world().size() > 1) {
      throw Error(ErrorKind::kConfig, "selftest runs in one process", "start it without mpirun");
    }
    config.device = chosen_device(arguments);
    config.device = choose_device(config) == DeviceType::kCuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  });
  const bool on_gpu = config.device == DeviceChoice::kCuda;
  const Stream stream = on_gpu ? make_cuda_stream(0) : Stream(DeviceType::kCpu, threads_per_rank(1));
  SelftestReport report;
  report.tell("device", on_gpu ? describe_cuda_device(0) : format("CPU, threads: {}", stream.threads()));
  check_products(report, stream);
  check_attention(report, stream);
  check_rows(report, stream);
  check_functions(report, stream);
  check_training(report, config.device, arguments.steps);
  report.tell(format("{} checks", report.checks()), format("{} FAILED", report.failed()));
  return report.failed() == 0 ? 0 : 1;
}

}  // namespace invar::app
