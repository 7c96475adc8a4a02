#include "config/hf_towers.h"

#include <algorithm>

#include "config/hf_families.h"

namespace invar {
namespace {

// The classes of transformers 5.24 whose text model is a dense Qwen3 or Gemma 4. Qwen3-VL rotates by three positions,
// which are equal for text. Prefixes are those of the files that it writes and of the releases.
constexpr HfWrapper kWrappers[] = {
    {"gemma4",
     "gemma4_text",
     true,
     {{"vision_config", "vision", {"model.vision_tower.", "model.embed_vision."}},
      {"audio_config", "audio", {"model.audio_tower.", "model.embed_audio."}}}},
    {"gemma4_unified",
     "gemma4_unified_text",
     true,
     {{"vision_config", "vision", {"model.vision_embedder.", "model.embed_vision."}},
      {"audio_config", "audio", {"model.embed_audio."}}}},
    {"qwen3_vl", "qwen3_vl_text", false, {{"vision_config", "vision", {"model.visual."}}}},
    {"qwen3_asr", "qwen3", true, {{"audio_config", "audio", {"model.audio_tower.", "model.multi_modal_projector."}}}},
};

}  // namespace

std::span<const HfWrapper> hf_wrappers() {
  return kWrappers;
}

const HfWrapper* find_hf_wrapper(std::string_view model_type) {
  const auto found = std::find_if(std::begin(kWrappers), std::end(kWrappers),
                                  [&](const HfWrapper& wrapper) { return wrapper.model_type == model_type; });
  return found == std::end(kWrappers) ? nullptr : found;
}

std::vector<HfTower> read_hf_towers(const std::string& folder) {
  const JsonObject file = open_hf_config(folder);
  std::vector<HfTower> towers;
  const HfWrapper* wrapper = find_hf_wrapper(file.text("model_type", ""));
  if (wrapper == nullptr) return towers;
  for (const HfTowerRow& row : wrapper->towers) {
    if (row.field.empty() || !file.has(std::string(row.field))) continue;
    HfTower& tower = towers.emplace_back(HfTower{std::string(row.modality), {}});
    for (const std::string_view prefix : row.prefixes) {
      if (!prefix.empty()) tower.prefixes.emplace_back(prefix);
    }
  }
  return towers;
}

}  // namespace invar
