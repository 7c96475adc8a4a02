#include "core/json_object.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/input_file.h"
#include "core/shown.h"

namespace invar {
namespace {

using Json = nlohmann::json;

// The keys of each object as they come in the text; the values themselves are sorted. An object's place in memory stays
// the same when its value is moved.
using Order = std::unordered_map<const Json::object_t*, std::vector<std::string>>;

constexpr size_t kMaxDepth = 64;
constexpr int64_t kMaxValues = 4'000'000;  // some take forty times their bytes in memory
constexpr int kOutOfRange = 406;           // nlohmann's number of "number overflow"

// Builds the value of a text and keeps the rules that the parser has not: few levels, not too many values, each key
// once.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const std::string& text, const std::string& where, const JsonRules& rules, bool count_lines)
      : text_(text), where_(where), rules_(rules), count_lines_(count_lines) {}

  Json take() { return std::move(root_); }
  Order take_order() { return std::move(order_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(int64_t value) override { return add(value); }
  bool number_unsigned(uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(Json::binary_t&) override { return false; }  // no text holds one
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    Level& level = levels_.back();
    level.key = name;
    auto& object = level.value->get_ref<Json::object_t&>();
    const auto [place, is_new] = object.try_emplace(name);
    if (!is_new) refuse(where_, format("{} is given twice", field()), "keep one of the two");
    order_[&object].push_back(name);
    level.place = &place->second;
    return true;
  }

  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception& error) override {
    std::string where = where_;
    if (count_lines_) {
      const auto end = text_.begin() + static_cast<std::ptrdiff_t>(std::min(position, text_.size()));
      where += format(":{}", 1 + std::count(text_.begin(), end, '\n'));
    }
    if (error.id == kOutOfRange) {
      refuse(where, format("{} must be a number that a double holds, not {}", field(), shown(token)), rules_.fix);
    }
    refuse(where, "not valid JSON", rules_.fix);
  }

 private:
  struct Level {
    Json* value;            // an object or a list
    Json* place = nullptr;  // of an object's next value
    std::string key = {};
  };

  // Ancestors stay where they are: a list grows only when none of its items is open.
  Json* put(Json&& value) {
    if (++values_ > kMaxValues) refuse(where_, format("more than {} values", kMaxValues), rules_.fix);
    if (levels_.empty()) return &(root_ = std::move(value));
    Level& level = levels_.back();
    if (level.value->is_object()) return &(*level.place = std::move(value));
    return &level.value->emplace_back(std::move(value));
  }

  bool add(Json&& value) {
    put(std::move(value));
    return true;
  }

  bool open(Json&& value) {
    if (levels_.size() == kMaxDepth) refuse(where_, format("more than {} levels deep", kMaxDepth), rules_.fix);
    levels_.push_back({put(std::move(value))});
    return true;
  }

  bool close() {
    levels_.pop_back();
    return true;
  }

  // The full name of the field that is being read.
  std::string field() const {
    std::string name;
    for (const Level& level : levels_) {
      if (level.value->is_array()) {
        const size_t open_items = &level == &levels_.back() ? 0 : 1;  // they are in the list already
        name += format("[{}]", level.value->size() - open_items);
      } else {
        name += (name.empty() ? "" : ".") + level.key;
      }
    }
    return name.empty() ? "the value" : shown(name);
  }

  [[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& hint) const {
    throw Error(rules_.kind, format("{}: {}", where, what), hint);
  }

  const std::string& text_;
  const std::string& where_;
  const JsonRules& rules_;
  bool count_lines_;
  Json root_;
  Order order_;
  std::vector<Level> levels_;
  int64_t values_ = 0;
};

}  // namespace

struct JsonObject::Document {
  std::string where;
  JsonRules rules;
  Json root;
  Order order;
};

struct JsonObject::Node {
  std::shared_ptr<const Document> document;
  const Json* json;    // an object
  std::string prefix;  // of the names: "rope_parameters."; empty for the whole text

  const Json* find(const std::string& name) const {
    const auto found = json->find(name);
    return found == json->end() ? nullptr : &*found;
  }
  const Json& at(const std::string& name) const { return *find(name); }

  std::shared_ptr<const Node> below(const Json& value, const std::string& name) const {
    return std::make_shared<const Node>(Node{document, &value, name + "."});
  }
};

JsonObject::JsonObject(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

JsonObject JsonObject::open(const std::string& path, const JsonRules& rules) {
  return read(read_text_file(path, rules.max_bytes, rules.fix, rules.kind), path, rules, true);
}

JsonObject JsonObject::parse(const std::string& text, const std::string& where, const JsonRules& rules) {
  return read(text, where, rules, false);
}

JsonObject JsonObject::read(const std::string& text, const std::string& where, const JsonRules& rules,
                            bool count_lines) {
  Builder builder(text, where, rules, count_lines);
  Json::sax_parse(text, &builder);
  const auto document = std::make_shared<const Document>(Document{where, rules, builder.take(), builder.take_order()});
  if (!document->root.is_object()) throw Error(rules.kind, format("{}: not a JSON object", where), rules.fix);
  return JsonObject(std::make_shared<const Node>(Node{document, &document->root, ""}));
}

void JsonObject::refuse(const std::string& what, const std::string& hint) const {
  throw Error(node_->document->rules.kind, format("{}: {}", node_->document->where, what), hint);
}

void JsonObject::refuse_type(const std::string& name, const char* type) const {
  refuse(format("{} must be {}, not {}", full_name(name), type, json(name)), node_->document->rules.fix);
}

bool JsonObject::has(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && !value->is_null();
}

bool JsonObject::is_null(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && value->is_null();
}

bool JsonObject::is_object(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && value->is_object();
}

bool JsonObject::is_list(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && value->is_array();
}

bool JsonObject::is_number(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && value->is_number();
}

bool JsonObject::is_text(const std::string& name) const {
  const Json* value = node_->find(name);
  return value && value->is_string();
}

void JsonObject::require(std::initializer_list<const char*> names) const {
  std::string missing;
  for (const char* name : names) {
    if (!has(name)) missing += (missing.empty() ? "" : ", ") + full_name(name);
  }
  if (!missing.empty()) refuse(format("missing {}", missing), node_->document->rules.missing);
}

namespace {

constexpr const char* kInteger = "an integer";

bool fits_int64(const Json& value) {
  constexpr auto kLargest = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  return value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= kLargest);
}

template <class Holds>
bool is_list_of(const Json& value, Holds holds) {
  return value.is_array() && std::all_of(value.begin(), value.end(), holds);
}

}  // namespace

int64_t JsonObject::integer(const std::string& name, int64_t absent) const {
  if (!has(name)) return absent;
  const Json& value = node_->at(name);
  if (!fits_int64(value)) refuse_type(name, value.is_number_integer() ? "an integer below 2^63" : kInteger);
  return value.get<int64_t>();
}

double JsonObject::number(const std::string& name, double absent) const {
  if (!has(name)) return absent;
  if (!is_number(name)) refuse_type(name, "a number");
  return node_->at(name).get<double>();
}

bool JsonObject::boolean(const std::string& name, bool absent) const {
  if (!has(name)) return absent;
  if (!node_->at(name).is_boolean()) refuse_type(name, "true or false");
  return node_->at(name).get<bool>();
}

std::string JsonObject::text(const std::string& name, const std::string& absent) const {
  if (!has(name)) return absent;
  if (!is_text(name)) refuse_type(name, "a string");
  return node_->at(name).get<std::string>();
}

std::vector<int64_t> JsonObject::integers(const std::string& name) const {
  if (!has(name)) return {};
  const Json& list = node_->at(name);
  if (!is_list_of(list, fits_int64)) refuse_type(name, "a list of integers");
  return list.get<std::vector<int64_t>>();
}

std::vector<std::string> JsonObject::texts(const std::string& name) const {
  if (!has(name)) return {};
  const Json& list = node_->at(name);
  if (!is_list_of(list, [](const Json& item) { return item.is_string(); })) refuse_type(name, "a list of strings");
  return list.get<std::vector<std::string>>();
}

std::vector<JsonObject> JsonObject::objects(const std::string& name) const {
  if (!has(name)) return {};
  const Json& list = node_->at(name);
  if (!is_list_of(list, [](const Json& item) { return item.is_object(); })) refuse_type(name, "a list of objects");
  std::vector<JsonObject> objects;
  for (const Json& item : list) {
    objects.push_back(JsonObject(node_->below(item, format("{}[{}]", node_->prefix + name, objects.size()))));
  }
  return objects;
}

JsonObject JsonObject::object(const std::string& name) const {
  if (!is_object(name)) refuse_type(name, "an object");
  return JsonObject(node_->below(node_->at(name), node_->prefix + name));
}

std::vector<std::string> JsonObject::names() const {
  const Order& order = node_->document->order;
  const auto found = order.find(node_->json->get_ptr<const Json::object_t*>());
  return found == order.end() ? std::vector<std::string>() : found->second;
}

std::string JsonObject::full_name(const std::string& name) const {
  return shown(node_->prefix + name);
}

std::string JsonObject::json(const std::string& name) const {
  const Json* value = node_->find(name);
  return value ? shown(value->dump(-1, ' ', false, Json::error_handler_t::replace)) : "absent";
}

}  // namespace invar
