#include "app/commands.h"
#include "app/console.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/run_directory.h"
#include "core/tensor.h"

namespace invar::app {
namespace {

std::string mib(int64_t bytes) {
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

void print_tensors(const CheckpointIndex& index) {
  std::vector<int> pieces(index.tensors.size());
  for (const StoredPiece& piece : index.pieces) ++pieces[piece.tensor];
  print_line(format("{:<72} {:<18} {:>6}", "tensor", "shape", "pieces"));
  for (size_t i = 0; i < index.tensors.size(); ++i) {
    print_line(format("{:<72} {:<18} {:>6}", index.tensors[i].name, describe_shape(index.tensors[i].shape), pieces[i]));
  }
}

// The config's lines of the sections that a resumed run must share: of imported weights only the model.
void print_contract(const std::string& config, bool imported) {
  bool inside = false;
  for (size_t begin = 0; begin < config.size();) {
    const size_t end = std::min(config.find('\n', begin), config.size());
    const std::string line = config.substr(begin, end - begin);
    if (!line.starts_with(" ")) inside = line == "model:" || (line == "numerics:" && !imported);
    if (inside) print_line("  " + line);
    begin = end + 1;
  }
}

}  // namespace

int inspect(const InspectArguments& arguments, MpiSession& session) {
  if (session.world().rank() != 0) return 0;
  const CheckpointReader reader(find_checkpoint(arguments.path));
  const CheckpointIndex& index = reader.index();
  const CheckpointInfo& info = index.info;
  const std::string skipped = info.skipped_steps > 0 ? format(", {} skipped", info.skipped_steps) : "";
  print_line(format("checkpoint  {}", reader.folder().string()));
  print_line(format("step        {}{}", info.step, skipped));
  print_line(format("data        {} samples consumed, {} tokens trained on", info.samples, info.tokens));
  print_line(format("written at  {}", info.layout));
  print_line(format("files       {} of {} in all", index.files.size(), mib(index.bytes())));
  print_line(format("tensors     {} in {} pieces{}", index.tensors.size(), index.pieces.size(),
                    reader.has_moments() ? "" : "; weights alone, no moments"));
  if (!info.contract.empty()) print_line(format("contract    {}", info.contract_hash));
  print_line("a run that resumes from it must have:");
  print_contract(info.config, !reader.has_moments());
  if (arguments.tensors) print_tensors(index);
  if (arguments.verify) {
    reader.verify(threads_per_rank(session.local_size()));
    print_line("verified: every checksum is right");
  }
  return 0;
}

}  // namespace invar::app
