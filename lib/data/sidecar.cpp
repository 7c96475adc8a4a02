#include "data/sidecar.h"

#include "core/json_object.h"
#include "core/presence.h"
#include "core/shown.h"

namespace invar {
namespace {

constexpr const char* kMadeOfAnother =
    "the two files do not belong together: make both anew with tools/tokenise, or remove the .json if it is wrong";

std::optional<int64_t> number_in(const JsonObject& json, const char* name) {
  if (!json.has(name)) return std::nullopt;
  const int64_t number = json.integer(name);
  if (number < 0) json.refuse(format("{} is {}", name, number), kMadeOfAnother);
  return number;
}

}  // namespace

std::optional<Sidecar> read_sidecar(const std::string& token_file) {
  const std::string path = token_file + ".json";
  const JsonRules rules{.fix = "tools/tokenise writes it; remove it if it is of another program"};
  if (!is_there(path, rules.fix)) return std::nullopt;
  const JsonObject json = JsonObject::open(path, rules);
  return Sidecar{path,
                 json.text("dtype", ""),
                 number_in(json, "vocab_size"),
                 number_in(json, "eod_id"),
                 number_in(json, "tokens"),
                 print_of(InputFile(path))};
}

void check_sidecar(const Sidecar& sidecar, const TokenArray& tokens, int64_t vocab_size) {
  if (!sidecar.dtype.empty() && sidecar.dtype != name_of(tokens.type())) {
    throw Error(ErrorKind::kData,
                format("{}: the tokens of {} are {}, but {} says {}", sidecar.path, tokens.path(), shown(sidecar.dtype),
                       tokens.source(), name_of(tokens.type())),
                kMadeOfAnother);
  }
  if (sidecar.tokens && *sidecar.tokens != tokens.size()) {
    throw Error(ErrorKind::kData,
                format("{}: {} has {} tokens, but the file holds {}", sidecar.path, tokens.path(), *sidecar.tokens,
                       tokens.size()),
                kMadeOfAnother);
  }
  if (sidecar.vocab_size && *sidecar.vocab_size > vocab_size) {
    throw Error(ErrorKind::kData,
                format("{}: the tokens of {} are of a vocabulary of {}, but model.vocab_size is {}", sidecar.path,
                       tokens.path(), *sidecar.vocab_size, vocab_size),
                "use the tokenizer of the model, or a model with the vocabulary of the tokens");
  }
}

}  // namespace invar
