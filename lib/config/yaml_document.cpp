#include "config/yaml_document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <map>
#include <optional>
#include <sstream>

#include "core/format.h"

namespace invar {
namespace {

constexpr size_t kDeepest = 16;         // a config has 4 levels
constexpr size_t kMostValues = 200000;  // a list of all ranks of the largest job has fewer

int line_of(const YAML::Mark& mark) {
  return mark.is_null() ? 0 : mark.line + 1;
}

// A long text counts for several values, so that their number bounds the memory too.
size_t count_values(const YamlNode& node) {
  constexpr size_t kLongText = 1024;  // bytes
  size_t count = 1 + node.text.size() / kLongText;
  for (const YamlNode& item : node.items) count += count_values(item);
  return count;
}

// Builds the tree of the first document and refuses whatever begins after its end.
class Builder : public YAML::EventHandler {
 public:
  YamlNode result() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ == 1) return;
    throw YamlFault{line_of(mark), "a second YAML document begins here",
                    "keep one: remove the line ---, or a comma or bracket too many"};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    begin(mark, anchor, {YamlNode::Kind::kNull, line_of(mark)});
    end();
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    begin(mark, anchor, {YamlNode::Kind::kScalar, line_of(mark), value, tag});
    end();
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchored_.find(anchor);
    if (found == anchored_.end()) throw YamlFault{line_of(mark), "an alias stands inside its own anchor", "remove it"};
    count(mark, count_values(found->second));
    place(found->second);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    begin(mark, anchor, {YamlNode::Kind::kList, line_of(mark)});
  }
  void OnSequenceEnd() override { end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    begin(mark, anchor, {YamlNode::Kind::kMap, line_of(mark)});
  }
  void OnMapEnd() override { end(); }

 private:
  struct Open {
    YamlNode node;
    YAML::anchor_t anchor;
  };

  void count(const YAML::Mark& mark, size_t values) {
    values_ += values;
    if (values_ <= kMostValues) return;
    throw YamlFault{line_of(mark),
                    format("more than {} values, those that aliases repeat counted each time", kMostValues),
                    "a config has some hundred values"};
  }

  void begin(const YAML::Mark& mark, YAML::anchor_t anchor, YamlNode node) {
    count(mark, count_values(node));
    if (open_.size() == kDeepest) {
      throw YamlFault{line_of(mark), format("values inside one another, more than {} deep", kDeepest),
                      "a config has sections, keys and values; look for an unclosed bracket"};
    }
    open_.push_back({std::move(node), anchor});
  }

  void end() {
    Open closed = std::move(open_.back());
    open_.pop_back();
    if (closed.anchor != YAML::NullAnchor)
      anchored_[closed.anchor] = closed.node;  // at most kDeepest copies of a value
    place(std::move(closed.node));
  }

  void place(YamlNode node) {
    if (open_.empty()) {
      root_ = std::move(node);
    } else {
      open_.back().node.items.push_back(std::move(node));
    }
  }

  YamlNode root_;
  std::vector<Open> open_;
  std::map<YAML::anchor_t, YamlNode> anchored_;
  size_t documents_ = 0;
  size_t values_ = 0;
};

}  // namespace

YamlNode parse_yaml(const std::string& text) {
  if (text.size() > kLargestYaml) {
    throw YamlFault{0, format("{} bytes of YAML, where at most {} are read", text.size(), kLargestYaml),
                    "a config has some hundred lines"};
  }
  std::istringstream stream(text);
  Builder builder;
  try {
    YAML::Parser parser(stream);
    for (int document = 0; document < 2; ++document) {  // the second is refused as it begins
      if (!parser.HandleNextDocument(builder)) break;
    }
  } catch (const YAML::Exception& error) {
    throw YamlFault{line_of(error.mark), "not valid YAML: " + error.msg, ""};
  }
  return builder.result();
}

}  // namespace invar
