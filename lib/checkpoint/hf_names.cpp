#include "checkpoint/hf_names.h"

#include <algorithm>
#include <iterator>
#include <string_view>

namespace invar {
namespace {

constexpr std::string_view kText = "model.";
constexpr std::string_view kMultimodalText = "model.language_model.";
constexpr std::string_view kOtherModalities[] = {"model.vision_tower.", "model.audio_tower.", "model.embed_vision.",
                                                 "model.embed_audio."};

std::string with_prefix(const std::string& name, std::string_view from, std::string_view to) {
  return name.starts_with(from) ? std::string(to) + name.substr(from.size()) : name;
}

}  // namespace

std::string text_model_name(const std::string& name) {
  return with_prefix(name, kMultimodalText, kText);
}

std::string multimodal_name(const std::string& name) {
  return with_prefix(name, kText, kMultimodalText);
}

bool is_other_modality(const std::string& name) {
  return std::any_of(std::begin(kOtherModalities), std::end(kOtherModalities),
                     [&](std::string_view part) { return name.starts_with(part); });
}

}  // namespace invar
