// What must be compared is counted from the model: a reference that lacks it, or has it in another shape, is refused.
#include "app/reference_case.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "support/bytes.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

const std::filesystem::path kCase = std::filesystem::path(INVAR_SOURCE_DIR) / "tests/reference/qwen3";

struct RawTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

RawTensors read_raw(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  const auto length = values_of<uint64_t>(file.substr(0, 8))[0];
  const std::string data = file.substr(8 + length);
  RawTensors tensors;
  const nlohmann::json header = nlohmann::json::parse(file.substr(8, length));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {entry["dtype"], entry["shape"], data.substr(begin, end - begin)};
  }
  return tensors;
}

std::string raw_file(const RawTensors& tensors) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  const std::string text = header.dump();
  return bytes_of(std::vector<uint64_t>{text.size()}) + text + data;
}

// The case qwen3 (4 layers, hidden 48, vocabulary 250, batch 4, length 32) with its reference changed.
void open_changed(const std::function<void(RawTensors&)>& change) {
  const TemporaryFolder folder;
  for (const auto& entry : std::filesystem::directory_iterator(kCase)) {
    if (entry.is_regular_file()) std::filesystem::copy(entry.path(), folder.path());
  }
  RawTensors tensors = read_raw(kCase / "expected.safetensors");
  change(tensors);
  folder.write("expected.safetensors", raw_file(tensors));
  const ReferenceCase reference(folder.path());
}

void refuses(const std::vector<std::string>& message, const std::function<void(RawTensors&)>& change) {
  require_error(ErrorKind::kData, message, {"make_reference.py"}, [&] { open_changed(change); });
}

}  // namespace

TEST_CASE("a reference as it was written is opened") {
  CHECK_NOTHROW(open_changed([](RawTensors&) {}));
}

TEST_CASE("a reference that holds nothing to compare is refused") {
  refuses({"expected.safetensors: hidden.0 has the shape (0), but (4, 32, 48)"}, [](RawTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (name.starts_with("hidden.")) tensor = {"F32", {0}, ""};
    }
    tensors["logits"] = {"F32", {4, 32, 0}, ""};
  });
  refuses({"logits has the shape (4, 32, 0), but (4, 32, 250)"}, [](RawTensors& tensors) {
    tensors["logits"] = {"F32", {4, 32, 0}, ""};
  });
}

TEST_CASE("a reference of other shapes or types than the model's is refused") {
  refuses({"hidden.3 has the shape (4, 48, 32)"}, [](RawTensors& t) { t["hidden.3"].shape = {4, 48, 32}; });
  refuses({"logits has the shape (1, 32, 1000)"}, [](RawTensors& t) { t["logits"].shape = {1, 32, 1000}; });
  refuses({"grad.model.norm.weight has the shape (24, 2), but (48)"}, [](RawTensors& t) {
    t["grad.model.norm.weight"].shape = {24, 2};
  });
  refuses({"traj_loss has the shape (5, 2), but (10)"}, [](RawTensors& t) { t["traj_loss"].shape = {5, 2}; });
  refuses({"hidden.1 is I32, but F32 or F64"}, [](RawTensors& t) { t["hidden.1"].dtype = "I32"; });
  refuses({"traj_grad_norm is I32, but F32 or F64"}, [](RawTensors& t) { t["traj_grad_norm"].dtype = "I32"; });
}

TEST_CASE("a reference without a layer's results is refused") {
  require_error(ErrorKind::kData, {"hidden.2"}, [] { open_changed([](RawTensors& t) { t.erase("hidden.2"); }); });
  require_error(ErrorKind::kData, {"logits"}, [] { open_changed([](RawTensors& t) { t.erase("logits"); }); });
}

TEST_CASE("a noise that bounds no error is refused") {
  for (const float noise : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1.0f}) {
    refuses({"fp32_noise holds", "bounds no error"}, [&](RawTensors& tensors) {
      tensors["fp32_noise"].bytes = bytes_of(std::vector<float>{1e-6f, noise, 1e-6f});
    });
  }
}

TEST_CASE("a comparison of nothing, of less than all, or that zeros would pass does not hold") {
  CHECK_FALSE(all_hold({}));
  Agreement agreement{.band = 1};
  CHECK(agreement.verdict() == "INCOMPLETE");
  agreement.expected_elements = 2;
  agreement.add(3, 2.5, 1);
  CHECK(agreement.verdict() == "INCOMPLETE");
  agreement.add(-0.5, 0.25, 1);
  CHECK(agreement.verdict() == "ok");
  CHECK(agreement.holds());
  Agreement small{.band = 1, .expected_elements = 1};
  small.add(0.25, 0.5, 1);
  CHECK(small.verdict() == "VACUOUS");
  CHECK_FALSE(all_hold({{"good", agreement}, {"small", small}}));
  Agreement far{.band = 1, .expected_elements = 1};
  far.add(std::numeric_limits<double>::quiet_NaN(), 9, 1);
  CHECK(far.verdict() == "OUTSIDE");
}
