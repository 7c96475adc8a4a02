// invar: the one executable. Subcommands live in files of their own; only this file ends the process.
#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <span>
#include <sstream>
#include <thread>

#include "app/commands.h"
#include "app/console.h"
#include "config/key_table.h"
#include "config/suggest.h"

namespace {

using invar::Error;
using invar::ErrorKind;

constexpr int kUsage = static_cast<int>(ErrorKind::kConfig);

void print_error(const Error& error, const std::string& who = "") {
  std::string text = "invar: error: " + who + error.what();
  if (error.kind() == ErrorKind::kFault) text += invar::format(" [{}]", error.location());
  text += "\n";
  if (!error.hint().empty()) text += "  hint: " + error.hint() + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

void print_error(const Error& error, invar::MpiSession& session) {
  const bool by_rank = session.world().size() > 1 && error.kind() != ErrorKind::kConfig;
  print_error(error, by_rank ? invar::format("rank {}: ", session.world().rank()) : "");
}

// A failure during a run: the other ranks may be inside a collective, so the whole job ends here. Ranks that fail
// together (a collective that broke, a file that all read) leave the word to the lowest one. Each waits whether a lower
// one says that it ends the job, the longer the higher it is, and then for its abort. Rank 0 may come late
// on a busy machine: the others give it a second.
[[noreturn]] void end_job(const Error& error, invar::MpiSession& session) {
  using Clock = std::chrono::steady_clock;
  invar::app::release_stop_signals();  // an abort comes as SIGTERM
  constexpr int kLongestWait = 12;
  constexpr std::chrono::seconds kForAbort(30);
  const int rank = session.world().rank();
  const auto wait = std::chrono::milliseconds(rank == 0 ? 0 : 750 + 250 * std::min(rank, kLongestWait));
  const auto until = Clock::now() + wait;
  bool is_told = session.end_is_announced();
  while (!is_told && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    is_told = session.end_is_announced();
  }
  if (is_told) {
    std::this_thread::sleep_for(kForAbort);
  } else {
    session.announce_end();
    print_error(error, session);
  }
  session.abort(static_cast<int>(error.kind()));
}

struct CommandLine {
  CLI::App app{"Distributed trainer for large language models"};
  invar::app::TrainArguments train;
  invar::app::PlanArguments plan;
  invar::app::ParityArguments parity;
  invar::app::CompareArguments compare;
  invar::app::EvalArguments eval;
  invar::app::InspectArguments inspect;
  invar::app::ExportArguments to_hf;
  invar::app::ImportArguments from_hf;
  invar::app::SelftestArguments selftest;
  CLI::App* train_command = nullptr;
  CLI::App* plan_command = nullptr;
  CLI::App* parity_command = nullptr;
  CLI::App* compare_command = nullptr;
  CLI::App* eval_command = nullptr;
  CLI::App* inspect_command = nullptr;
  CLI::App* export_command = nullptr;
  CLI::App* import_command = nullptr;
  CLI::App* selftest_command = nullptr;
  CLI::App* keys_command = nullptr;

  CommandLine() {
    app.require_subcommand(1);
    app.set_version_flag("--version", "invar " INVAR_VERSION);
    const std::string overrides_help = "section.key=value, over the file";
    train_command = app.add_subcommand("train", "Train as a config says; alone, or under mpirun or srun");
    train_command->add_option("config", train.config, "YAML file")->required();
    train_command->add_option("overrides", train.overrides, overrides_help);
    train_command
        ->add_option("--fake-world", train.fake_world,
                     "run rank 0 of a job of so many ranks alone, to time and size it: the others do not exist, what "
                     "they would send is made up, and communication takes local copies only")
        ->check(CLI::Range(1, 1 << 20));

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
    parity_command->add_flag("--poison-weights", parity.poison_weights,
                             "fill a weight with NaN when a layer has used it: proves that none reads it later");

    compare_command = app.add_subcommand("compare", "Compare two dumps, weights or metrics, tensor by tensor");
    compare_command
        ->add_option("A", compare.a, "a .h5 dump, .safetensors, Hugging Face folder, metrics.jsonl or run folder")
        ->required();
    compare_command->add_option("B", compare.b, "what A should be")->required();
    compare_command->add_option("--atol", compare.atol, "absolute part of the band; 1e-6 unless given");
    compare_command->add_option("--rtol", compare.rtol, "times the tensor's largest value in B; 1e-4 unless given");
    compare_command->add_option(
        "--norm-rtol", compare.norm_rtol,
        "the same for the gradient norms of metrics, which amplify rounding; --rtol unless given");
    compare_command->add_flag("--exact", compare.exact, "every bit must be equal");
    compare_command->add_flag("--all", compare.all, "list every gradient and weight");

    add_checkpoint_commands();
    selftest_command = app.add_subcommand("selftest", "Prove that invariant numerics hold on this machine");
    selftest_command->add_option("overrides", selftest.overrides, "device=auto, cpu or cuda");
    selftest_command->add_option("--steps", selftest.steps, "of each training; 3 unless given")
        ->check(CLI::Range(1, 1000));
    keys_command = app.add_subcommand("keys", "List every config key with type, default and meaning");
  }

  void add_checkpoint_commands() {
    const std::string path_help = "a checkpoint, or a folder of checkpoints, of which the latest";
    eval_command = app.add_subcommand("eval", "Validation loss of a checkpoint; alone, or under mpirun or srun");
    eval_command->add_option("checkpoint", eval.path, path_help)->required();
    eval_command->add_option("overrides", eval.overrides, "section.key=value, over the config it was saved with");

    inspect_command = app.add_subcommand("inspect", "Show what a checkpoint holds");
    inspect_command->add_option("checkpoint", inspect.path, path_help)->required();
    inspect_command->add_flag("--verify", inspect.verify, "read all of it and check every sum");
    inspect_command->add_flag("--tensors", inspect.tensors, "list the tensors");

    export_command = app.add_subcommand("export", "Write a checkpoint's weights as a Hugging Face folder");
    export_command->add_option("checkpoint", to_hf.path, path_help)->required();
    export_command->add_option("folder", to_hf.folder, "new, or without weights")->required();
    export_command->add_option("--dtype", to_hf.dtype, "fp32 or bf16; the run's precision unless given");

    import_command = app.add_subcommand("import", "Make a checkpoint, with fresh moments, of a Hugging Face folder");
    import_command->add_option("hf_folder", from_hf.hf_folder, "config.json and safetensors")->required();
    import_command->add_option("checkpoints", from_hf.checkpoints, "a new folder, for checkpoint.resume")->required();
  }
};

// What CLI11 found wrong, as an error like any other.
Error usage_error(const CommandLine& line, const CLI::ParseError& error, std::span<char* const> arguments) {
  const std::string all = "invar --help lists the subcommands, invar SUBCOMMAND --help their arguments";
  if (!line.app.get_subcommands().empty() || arguments.size() < 2 || arguments[1][0] == '-') {
    return Error(ErrorKind::kConfig, error.what(), all);
  }
  std::vector<std::string> names;
  for (const CLI::App* command : line.app.get_subcommands({})) names.push_back(command->get_name());
  const std::vector<std::string_view> known(names.begin(), names.end());
  const std::string_view nearest = invar::nearest_word(arguments[1], known);
  return Error(ErrorKind::kConfig, invar::format("unknown subcommand {}", arguments[1]),
               nearest.empty() ? all : invar::format("did you mean {}?", nearest));
}

// A command that leaves something behind goes on without its reader; the others have nobody left to work for.
void choose_signals(const CommandLine& line) {
  if (*line.train_command || *line.export_command || *line.import_command) std::signal(SIGPIPE, SIG_IGN);
  if (!*line.train_command) invar::app::heed_stop_signals();
}

int run(const CommandLine& line, invar::MpiSession& session) {
  choose_signals(line);
  if (*line.train_command) return invar::app::train(line.train, session);
  if (*line.plan_command) return invar::app::plan(line.plan, session);
  if (*line.parity_command) return invar::app::parity(line.parity, session);
  if (*line.eval_command) return invar::app::eval(line.eval, session);
  if (*line.inspect_command) return invar::app::inspect(line.inspect, session);
  if (*line.export_command) return invar::app::export_checkpoint(line.to_hf, session);
  if (*line.import_command) return invar::app::import_weights(line.from_hf, session);
  if (*line.selftest_command) return invar::app::selftest(line.selftest, session);
  if (*line.compare_command) return invar::app::compare(line.compare, session);
  if (session.world().rank() == 0) invar::app::print_line(invar::describe_keys());
  return 0;
}

void print_help(const CommandLine& line, const CLI::ParseError& asked) {
  std::ostringstream text;
  line.app.exit(asked, text, text);
  std::string lines = text.str();
  while (lines.ends_with('\n')) lines.pop_back();
  invar::app::print_line(lines);
}

int run_job(int argc, char** argv, invar::MpiSession& session) {
  CommandLine line;
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const bool is_help = error.get_exit_code() == 0;
    if (session.world().rank() == 0) {
      if (is_help)
        print_help(line, error);
      else
        print_error(usage_error(line, error, {argv, static_cast<size_t>(argc)}));
    }
    return is_help ? 0 : kUsage;
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
    end_job(invar::app::as_error(error), session);
  }
}

}  // namespace

int main(int argc, char** argv) {
  invar::app::catch_stop_signals();
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on the size of files is an error like a full disk
  try {
    invar::MpiSession session(&argc, &argv);
    return run_job(argc, argv, session);
  } catch (const Error& error) {  // no job came about
    print_error(error);
    return static_cast<int>(error.kind());
  }
}
