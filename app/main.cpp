// invar: the one executable. Subcommands live in files of their own; only this file ends the process.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <thread>

#include "app/commands.h"
#include "config/key_table.h"

namespace {

using invar::Error;
using invar::ErrorKind;

constexpr int kUsage = static_cast<int>(ErrorKind::kConfig);

void print_error(const Error& error, invar::MpiSession& session) {
  std::string text = "invar: error: ";
  if (session.world().size() > 1 && error.kind() != ErrorKind::kConfig)
    text += invar::format("rank {}: ", session.world().rank());
  text += error.what();
  if (error.kind() == ErrorKind::kFault) text += invar::format(" [{}]", error.location());
  text += "\n";
  if (!error.hint().empty()) text += "  hint: " + error.hint() + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

// A failure during a run: the other ranks may be inside a collective, so the whole job ends here. Ranks that fail
// together (a collective that broke, a file that all read) leave the word to the lowest one.
[[noreturn]] void end_job(const Error& error, invar::MpiSession& session) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20 * std::min(session.world().rank(), 100)));
  print_error(error, session);
  session.abort(static_cast<int>(error.kind()));
}

struct CommandLine {
  CLI::App app{"Distributed trainer for large language models"};
  invar::app::TrainArguments train;
  invar::app::PlanArguments plan;
  invar::app::ParityArguments parity;
  CLI::App* train_command = nullptr;
  CLI::App* plan_command = nullptr;
  CLI::App* parity_command = nullptr;
  CLI::App* keys_command = nullptr;

  CommandLine() {
    app.require_subcommand(1);
    const std::string overrides_help = "section.key=value, over the file";
    train_command = app.add_subcommand("train", "Train as a config says; alone, or under mpirun or srun");
    train_command->add_option("config", train.config, "YAML file")->required();
    train_command->add_option("overrides", train.overrides, overrides_help);

    plan_command = app.add_subcommand("plan", "Show what a run would need, without peers or devices");
    plan_command->add_option("config", plan.config, "YAML file")->required();
    plan_command->add_option("overrides", plan.overrides, overrides_help);
    plan_command->add_option("--world", plan.world, "ranks of the job")->required()->check(CLI::Range(1, 1 << 20));

    parity_command = app.add_subcommand("parity", "Compare with a reference case (tools/make_reference.py makes one)");
    parity_command->add_option("case", parity.case_dir, "folder of the case")->required();
    parity_command->add_option("overrides", parity.overrides, overrides_help);
    parity_command->add_option("--thread-ranks", parity.thread_ranks, "run this many ranks as threads of this process")
        ->check(CLI::Range(1, 256));
    parity_command->add_flag("--matrix", parity.matrix, "every layout of up to 8 ranks, as threads; one line each");

    keys_command = app.add_subcommand("keys", "List every config key with type, default and meaning");
  }
};

int run(CommandLine& line, invar::MpiSession& session) {
  if (*line.train_command) return invar::app::train(line.train, session);
  if (*line.plan_command) return invar::app::plan(line.plan);
  if (*line.parity_command) return invar::app::parity(line.parity, session);
  std::puts(invar::describe_keys().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  invar::MpiSession session(&argc, &argv);
  CommandLine line;
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const bool help = error.get_exit_code() == 0;
    if (session.world().rank() == 0) line.app.exit(error);
    return help ? 0 : kUsage;
  }
  try {
    return run(line, session);
  } catch (const invar::app::ReportedElsewhere& reported) {
    return reported.exit_code;
  } catch (const invar::app::SetupError& failed) {
    print_error(failed.error, session);
    return static_cast<int>(failed.error.kind());
  } catch (const Error& error) {
    end_job(error, session);
  } catch (const std::exception& error) {
    end_job(Error(ErrorKind::kFault, error.what()), session);
  }
}
