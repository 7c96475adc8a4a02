#include "checkpoint/hf_weights.h"

#include <filesystem>
#include <map>

#include "comm/thread_communicator.h"
#include "config/hf_config.h"
#include "models/decoder_model.h"
#include "parallel/logical_tensor.h"
#include "support/errors.h"
#include "support/rank_checks.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;
namespace fs = std::filesystem;

namespace {

const std::string kCase = INVAR_SOURCE_DIR "/tests/reference/qwen3";
const std::string kGemma4 = INVAR_SOURCE_DIR "/tests/reference/gemma4_e4b";
const std::string kGemma4Dense = INVAR_SOURCE_DIR "/tests/reference/gemma4_dense";

using Tensors = std::map<std::string, std::vector<float>>;

// A model's parameters on this rank, without anything else of a run.
struct Model {
  Model(const ModelConfig& config, const ProcessGroups& groups, DType dtype)
      : model(decoder_spec(config), groups, *sums, options(dtype), {stream, values, gradients, constants}) {}
  static DecoderModel::Options options(DType dtype) {
    DecoderModel::Options options;
    options.dtype = dtype;
    options.sequence_length = 4;
    return options;
  }
  Stream stream{DeviceType::kCpu};
  std::unique_ptr<SumPolicy> sums = fast_sums();
  Arena values{"values", DeviceType::kCpu, 1 << 22};
  Arena gradients{"gradients", DeviceType::kCpu, 1 << 22};
  Arena constants{"constants", DeviceType::kCpu, 1 << 16};
  DecoderModel model;
};

Tensors collect(const Model& model, const ProcessGroups& groups) {
  Tensors all;
  const ParameterTable& table = model.model.parameters();
  for (const Weight& weight : table.weights()) {
    for (const Parameter& parameter : weight.parameters) {
      all[parameter.name] =
          collect_logical(*groups.tensor, Stream(DeviceType::kCpu), table.flat_values(), weight, parameter);
    }
  }
  return all;
}

// Loads `folder`, weights of the model of `model_case`, at a tensor degree, gives the logical tensors; exports to `to`
// if asked.
Tensors load_at(const fs::path& folder, int tensor, int data, DType dtype, const fs::path& to = {},
                int64_t max_shard_bytes = int64_t{5} << 30, const std::string& model_case = kCase) {
  Tensors result;
  const ModelConfig config = read_hf_config(model_case);
  run_thread_ranks(tensor * data, [&](Communicator& world) {
    const ProcessGroups groups = make_process_groups(world, {tensor, data});
    Model model(config, groups, dtype);
    load_hf_weights(model.model.parameters(), Stream(DeviceType::kCpu), HfWeights(folder));
    Tensors mine = collect(model, groups);
    if (!to.empty()) {
      export_hf_weights(model.model.parameters(), groups, Stream(DeviceType::kCpu), to, max_shard_bytes);
    }
    if (world.rank() == 0) result = std::move(mine);
  });
  return result;
}

Tensors read_tensors(const fs::path& path) {
  const SafetensorsReader reader(path);
  Tensors all;
  for (const std::string& name : reader.names()) {
    const SafetensorsInfo& info = reader.info(name);
    auto& values = all[name];
    values.resize(static_cast<size_t>(info.rows() * info.cols()));
    reader.read_rows(name, {0, info.rows()}, {0, info.cols()}, values);
  }
  return all;
}

// The case's file with `edit` applied to its tensors and their shapes.
struct Named {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
void write_edited(const fs::path& folder, const std::function<void(std::map<std::string, Named>&)>& edit,
                  const std::string& model_case) {
  const SafetensorsReader reader(model_case + "/model.safetensors");
  std::map<std::string, Named> tensors;
  for (const auto& [tensor, values] : read_tensors(model_case + "/model.safetensors")) {
    tensors[tensor] = {reader.info(tensor).shape, values};
  }
  edit(tensors);
  std::vector<SafetensorsSpec> specs;
  for (const auto& [tensor, named] : tensors) specs.push_back({tensor, DType::kF32, named.shape});
  SafetensorsWriter writer(folder / "model.safetensors", specs);
  for (const auto& [tensor, named] : tensors) writer.write_rows(tensor, 0, named.shape[0], named.values);
  writer.finish();
}

// What is said when the edited file is loaded; empty if it is taken.
std::string refusal_of(const std::function<void(std::map<std::string, Named>&)>& edit,
                       const std::string& model_case = kCase) {
  const TemporaryFolder folder;
  write_edited(folder.path(), edit, model_case);
  return message_of(ErrorKind::kData,
                    [&] { load_at(folder.path(), 1, 1, DType::kF32, {}, int64_t{5} << 30, model_case); });
}

// As the releases for several modalities name the text model's tensors.
std::map<std::string, Named> renamed(const std::map<std::string, Named>& tensors) {
  std::map<std::string, Named> out;
  for (const auto& [name, named] : tensors) out["model.language_model." + name.substr(6)] = named;
  return out;
}

}  // namespace

TEST_CASE("weights load at any layout and come together as they were in the file") {
  const Tensors file = read_tensors(kCase + "/model.safetensors");
  for (const int tensor : {1, 2, 3, 4, 8}) CHECK(load_at(kCase + "/model.safetensors", tensor, 1, DType::kF32) == file);
}

TEST_CASE("export at one layout, import at another: the same tensors, in one file or in shards") {
  const Tensors file = read_tensors(kCase + "/model.safetensors");
  for (const int64_t shard : {int64_t{5} << 30, int64_t{100000}}) {
    const TemporaryFolder folder;
    load_at(kCase + "/model.safetensors", 4, 2, DType::kF32, folder.path(), shard);
    CHECK(fs::exists(folder / "model.safetensors.index.json") == (shard == 100000));
    CHECK(load_at(folder.path(), 3, 1, DType::kF32) == file);
  }
}

TEST_CASE("a bf16 model exports bf16") {
  const TemporaryFolder folder;
  const Tensors rounded = load_at(kCase + "/model.safetensors", 2, 1, DType::kBF16, folder.path());
  CHECK(SafetensorsReader(folder.path()).info("model.norm.weight").dtype == "BF16");
  CHECK(read_tensors(folder.path()) == rounded);
  CHECK(rounded != read_tensors(kCase + "/model.safetensors"));
}

TEST_CASE("import is strict: missing, unknown and misshapen tensors are named") {
  const std::string q = "model.layers.2.self_attn.q_proj.weight";
  CHECK(contains(refusal_of([&](auto& t) { t.erase(q); }), q));
  const std::string extra = "model.layers.9.extra";
  CHECK(contains(refusal_of([&](auto& t) { t[extra] = Named{{2}, {1, 2}}; }), extra));
  const std::string shape = refusal_of([&](auto& t) { std::swap(t[q].shape[0], t[q].shape[1]); });
  CHECK(contains(shape, q));
  CHECK(contains(shape, "has shape (48, 128), the model needs (128, 48)"));
}

TEST_CASE("a head beside tied embeddings must equal them") {
  const auto with_head = [](float change) {
    return refusal_of([&](auto& t) {
      t["lm_head.weight"] = t["model.embed_tokens.weight"];
      t["lm_head.weight"].values[7] += change;
    });
  };
  CHECK(with_head(0).empty());
  CHECK(contains(with_head(1), "lm_head.weight"));
}

TEST_CASE("Gemma 4: weights load at any layout and come together, and export is their inverse") {
  for (const std::string& model_case : {kGemma4, kGemma4Dense}) {
    const Tensors file = read_tensors(model_case + "/model.safetensors");
    for (const int tensor : {1, 2, 3, 4, 8}) {
      const TemporaryFolder folder;
      CHECK(load_at(model_case, tensor, 1, DType::kF32, folder.path(), int64_t{5} << 30, model_case) == file);
      CHECK(read_tensors(folder.path()) == file);
    }
  }
}

TEST_CASE("Gemma 4: a released file's names and its unused keys and values are taken") {
  const TemporaryFolder folder;
  write_edited(
      folder.path(),
      [](auto& t) {
        t = renamed(t);
        for (const char* name : {"k_proj.weight", "v_proj.weight", "k_norm.weight"}) {
          t[std::string("model.language_model.layers.9.self_attn.") + name] = Named{{4}, {1, 2, 3, 4}};
        }
      },
      kGemma4);
  CHECK(load_at(folder.path(), 2, 1, DType::kF32, {}, int64_t{5} << 30, kGemma4) ==
        read_tensors(kGemma4 + "/model.safetensors"));
}

namespace {

// What transformers 5.24 saves of each class beside its text model, one name of each of a layer's tensors and more.
// tests/e2e/test_transformers.py makes all of them.
struct ReleasedClass {
  std::string model_type, text_type, model_case;
  std::vector<std::string> vision, audio;
};
const std::vector<ReleasedClass> kReleasedClasses = {
    {"gemma4",
     "gemma4_text",
     kGemma4,
     {"embed_vision.embedding_projection.weight", "vision_tower.encoder.layers.0.input_layernorm.weight",
      "vision_tower.encoder.layers.0.mlp.down_proj.linear.weight",
      "vision_tower.encoder.layers.1.self_attn.q_norm.weight", "vision_tower.patch_embedder.input_proj.weight",
      "vision_tower.patch_embedder.position_embedding_table"},
     {"audio_tower.layers.0.feed_forward1.ffw_layer_1.input_max", "audio_tower.layers.1.lconv1d.conv_norm.weight",
      "audio_tower.layers.1.self_attn.per_dim_scale", "audio_tower.output_proj.bias",
      "audio_tower.subsample_conv_projection.layer0.conv.weight", "embed_audio.embedding_projection.weight"}},
    {"gemma4_unified",
     "gemma4_unified_text",
     kGemma4Dense,
     {"embed_vision.embedding_projection.weight", "vision_embedder.patch_dense.bias",
      "vision_embedder.patch_dense.weight", "vision_embedder.patch_ln1.bias", "vision_embedder.patch_ln2.weight",
      "vision_embedder.pos_embedding", "vision_embedder.pos_norm.weight"},
     {"embed_audio.embedding_projection.weight"}},
    {"qwen3_vl",
     "qwen3_vl_text",
     kCase,
     {"visual.blocks.0.attn.qkv.weight", "visual.deepstack_merger_list.1.linear_fc1.bias", "visual.merger.norm.weight",
      "visual.patch_embed.proj.weight", "visual.pos_embed.weight"},
     {}},
    {"qwen3_asr",
     "qwen3",
     kCase,
     {},
     {"audio_tower.conv2d1.bias", "audio_tower.conv_out.weight", "audio_tower.layers.0.self_attn.k_proj.bias",
      "audio_tower.ln_post.weight", "multi_modal_projector.linear_1.weight"}},
};

// The config.json of such a class around the text model of its case, with the towers of these fields.
void write_wrapped_config(const TemporaryFolder& folder, const ReleasedClass& released,
                          const std::vector<std::string>& towers) {
  std::string text = read_file(released.model_case + "/config.json");
  for (const char* type : {"\"gemma4_text\"", "\"qwen3\""}) {
    const size_t at = text.find(type);
    if (at != std::string::npos) text.replace(at, std::string(type).size(), "\"" + released.text_type + "\"");
  }
  std::string json = R"({"model_type": ")" + released.model_type + R"(", "tie_word_embeddings": true, "text_config": )";
  json += text;
  for (const std::string& tower : towers) json += ", \"" + tower + R"(": {"hidden_size": 32})";
  folder.write("config.json", json + "}");
}

}  // namespace

TEST_CASE("every class of several modalities: its towers are left out where config.json declares them") {
  for (const ReleasedClass& released : kReleasedClasses) {
    INFO(released.model_type);
    const TemporaryFolder folder;
    const auto add = [&](std::map<std::string, Named>& t, const std::vector<std::string>& names) {
      for (const std::string& name : names) t["model." + name] = Named{{2}, {1, NAN}};  // which nobody reads
    };
    write_edited(
        folder.path(),
        [&](auto& t) {
          t = renamed(t);
          add(t, released.vision);
          add(t, released.audio);
        },
        released.model_case);
    std::vector<std::string> towers;
    if (!released.vision.empty()) towers.push_back("vision_config");
    if (!released.audio.empty()) towers.push_back("audio_config");
    write_wrapped_config(folder, released, towers);
    const auto load = [&] {
      return load_at(folder.path(), 2, 1, DType::kF32, {}, int64_t{5} << 30, released.model_case);
    };
    CHECK(load() == read_tensors(released.model_case + "/model.safetensors"));
    ModelConfig model = read_hf_config(folder.path().string());
    CHECK(model.hidden_size == read_hf_config(released.model_case).hidden_size);

    const auto count = [](const std::vector<std::string>& names, const char* modality) {
      return names.empty() ? "" : std::to_string(names.size()) + " tensors of " + modality;
    };
    const std::string vision = count(released.vision, "vision"), audio = count(released.audio, "audio");
    CHECK(HfWeights(folder.path()).describe_left_out() ==
          audio + (vision.empty() || audio.empty() ? "" : " and ") + vision);
    // Without its field a tower belongs to nothing.
    for (const std::string& dropped : towers) {
      INFO("without " << dropped);
      std::vector<std::string> others = towers;
      std::erase(others, dropped);
      write_wrapped_config(folder, released, others);
      const auto& names = dropped == "vision_config" ? released.vision : released.audio;
      const std::string message = message_of(ErrorKind::kData, [&] { (void)load(); });
      CHECK(contains(message, "the model has no parameter 'model." + *std::min_element(names.begin(), names.end())));
    }
  }
}

TEST_CASE("NaN and infinities in weights are named with file, tensor and element") {
  const std::string q = "model.layers.2.self_attn.q_proj.weight", norm = "model.norm.weight";
  const std::string o = "model.layers.1.self_attn.o_proj.weight";  // stored transposed
  CHECK(contains(refusal_of([&](auto& t) { t[q].values[3 * 48 + 5] = NAN; }),
                 "/model.safetensors: tensor '" + q + "': element [3, 5] is nan"));
  CHECK(contains(refusal_of([&](auto& t) { t[o].values[7 * 128 + 9] = -INFINITY; }),
                 "tensor '" + o + "': element [7, 9] is -inf"));
  CHECK(contains(refusal_of([&](auto& t) { t[norm].values[47] = INFINITY; }), "'" + norm + "': element [47] is inf"));
}

TEST_CASE("Gemma 4: import is strict about everything else") {
  const auto refusal = [](const auto& edit) { return refusal_of(edit, kGemma4); };
  const std::string scalar = "model.layers.3.layer_scalar";
  CHECK(contains(refusal([&](auto& t) { t.erase(scalar); }), scalar));
  const std::string own_v = "model.layers.6.self_attn.v_proj.weight";
  CHECK(contains(refusal([&](auto& t) { t.erase(own_v); }), own_v));
  // Both forms of one tensor.
  const std::string norm = "model.language_model.norm.weight";
  CHECK(contains(refusal([&](auto& t) { t[norm] = t["model.norm.weight"]; }), norm));
  // A tower that no config.json declares; one that no release has; keys of a layer that has its own.
  CHECK(contains(refusal([](auto& t) { t["model.vision_tower.a"] = Named{{1}, {1}}; }), "model.vision_tower.a"));
  CHECK(contains(refusal([](auto& t) {
                   t = renamed(t);
                   t["model.smell_tower.a"] = Named{{1}, {1}};
                 }),
                 "model.smell_tower.a"));
  CHECK(contains(refusal([](auto& t) { t["model.layers.9.self_attn.q_bias"] = Named{{1}, {1}}; }), "q_bias"));
  // The dense kind has no v_proj where values are the keys.
  const std::string v = "model.layers.5.self_attn.v_proj.weight";
  CHECK(contains(refusal_of([&](auto& t) { t[v] = t["model.layers.5.self_attn.k_proj.weight"]; }, kGemma4Dense), v));
  // Qwen3 has nothing unused.
  CHECK(contains(refusal_of([](auto& t) { t["model.layers.9.self_attn.k_norm.weight"] = Named{{1}, {1}}; }), "k_norm"));
}
