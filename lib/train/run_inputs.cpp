#include "train/run_inputs.h"

#include <algorithm>
#include <functional>
#include <string>

namespace invar {
namespace {

namespace fs = std::filesystem;

void add_files(const fs::path& folder, const std::function<bool(const std::string&)>& is_input,
               std::vector<InputPrint>& inputs) {
  std::vector<fs::path> files;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (is_input(entry->path().filename().string())) files.push_back(entry->path());
  }
  if (error) throw Error(ErrorKind::kData, format("{}: cannot be read: {}", folder.string(), error.message()));
  std::ranges::sort(files);
  for (const fs::path& file : files) inputs.push_back(print_of(InputFile(file.string())));
}

}  // namespace

std::vector<InputPrint> run_inputs(const TokenSource& tokens, const fs::path& hf_folder, const fs::path& checkpoint) {
  std::vector<InputPrint> inputs = tokens.inputs();
  if (!hf_folder.empty()) {
    const auto holds_weights = [](const std::string& name) {
      return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    };
    add_files(hf_folder, holds_weights, inputs);
  }
  if (!checkpoint.empty()) {
    add_files(
        checkpoint, [](const std::string& name) { return name.starts_with("index."); }, inputs);
  }
  return inputs;
}

}  // namespace invar
