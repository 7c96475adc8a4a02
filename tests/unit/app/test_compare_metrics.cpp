#include "app/compare_metrics.h"

#include <sys/stat.h>

#include "app/compare_report.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::app;
using namespace invar::test;

namespace {

MetricsTable table_of(const std::string& text) {
  const TemporaryFolder folder;
  return read_metrics(folder.write("metrics.jsonl", text));
}

std::string line(int step, double loss, const std::string& more = "") {
  return format("{{\"step\":{},\"loss\":{}{}}}\n", step, loss, more);
}

const FieldDifference& field(const MetricsDifference& difference, const std::string& name) {
  const auto found = std::find_if(difference.fields.begin(), difference.fields.end(),
                                  [&](const FieldDifference& f) { return f.field == name; });
  REQUIRE(found != difference.fields.end());
  return *found;
}

}  // namespace

TEST_CASE("Metrics are joined by step; the later of two lines counts, a torn one does not") {
  const MetricsTable table = table_of(line(1, 5) + line(2, 4) +
                                      R"({"step":2,"validation_loss":4.5})"
                                      "\n" +
                                      line(2, 3) + R"({"step":3,"lo)");
  CHECK(table.size() == 2);
  CHECK(table.at(2).at("loss") == 3);
  CHECK(table.at(2).at("validation_loss") == 4.5);
}

TEST_CASE("Each field has its largest difference and its first steps") {
  const MetricsDifference found =
      compare_metrics(table_of(line(1, 4) + line(2, 2, ",\"lr\":0.5") + line(3, 3)),
                      table_of(line(1, 4) + line(2, 2.0001, ",\"lr\":0.5") + line(3, 2)), {});
  CHECK(field(found, "loss").steps == 3);
  CHECK(field(found, "loss").max_abs == 1);
  CHECK(field(found, "loss").max_relative == 0.5);
  CHECK(field(found, "loss").first_differing == 2);
  CHECK(field(found, "loss").first_outside == 3);
  CHECK(field(found, "loss").verdict == Verdict::kOutside);
  CHECK(field(found, "lr").steps == 1);
  CHECK(field(found, "lr").verdict == Verdict::kEqual);
  CHECK_FALSE(found.inside());
}

TEST_CASE("The gradient norm has a tolerance of its own") {
  const auto inside = [](double norm_rtol) {
    const MetricsTable a = {{1, {{"loss", 2.0}, {"grad_norm", 10.0}}}};
    const MetricsTable b = {{1, {{"loss", 2.0}, {"grad_norm", 10.1}}}};
    return compare_metrics(a, b, {0, 1e-4, false, norm_rtol}).inside();
  };
  CHECK_FALSE(inside(1e-4));
  CHECK(inside(0.02));
  const MetricsTable a = {{1, {{"loss", 2.0}}}}, b = {{1, {{"loss", 2.01}}}};
  CHECK_FALSE(compare_metrics(a, b, {0, 1e-4, false, 0.02}).inside());
}

TEST_CASE("The band of metrics is atol + rtol times the value of B") {
  const auto inside = [](double a, double b, const Tolerance& tolerance) {
    return compare_metrics(table_of(line(1, a)), table_of(line(1, b)), tolerance).inside();
  };
  CHECK(inside(11.5, 10, {0.5, 0.1, false}));
  CHECK_FALSE(inside(11.75, 10, {0.5, 0.1, false}));
  CHECK(inside(1, 1, {0, 0, true}));
  CHECK_FALSE(inside(1, 1 + 1e-15, {0, 0, true}));
  CHECK(inside(1, 1 + 1e-15, {}));
}

TEST_CASE("Tokens must be equal, and a null is NaN") {
  const auto tokens = [](int64_t n) { return table_of(line(1, 1, format(",\"tokens\":{}", n))); };
  CHECK(compare_metrics(tokens(1'000'000), tokens(1'000'000), {}).inside());
  CHECK_FALSE(compare_metrics(tokens(1'000'000), tokens(1'000'001), {}).inside());
  const MetricsTable null = table_of("{\"step\":1,\"loss\":null}\n");
  CHECK_FALSE(compare_metrics(null, table_of(line(1, 1)), {}).inside());
  CHECK_FALSE(compare_metrics(table_of(line(1, 1)), null, {}).inside());
}

TEST_CASE("Steps of one side are told; none in common is a mistake") {
  const MetricsDifference found =
      compare_metrics(table_of(line(1, 1) + line(2, 1)), table_of(line(2, 1) + line(3, 1) + line(4, 1)), {});
  CHECK(found.only_a == std::vector<int64_t>{1});
  CHECK(found.only_b == std::vector<int64_t>{3, 4});
  CHECK(found.inside());
  const std::vector<std::string> lines = describe(found);
  CHECK(std::find(lines.begin(), lines.end(), "1 step only in A: 1") != lines.end());
  CHECK(std::find(lines.begin(), lines.end(), "2 steps only in B: 3, 4") != lines.end());
  require_error(ErrorKind::kConfig, {"no step with a loss in common"},
                [] { compare_metrics(table_of(line(1, 1)), table_of(line(2, 1)), {}); });
}

TEST_CASE("Metrics that cannot be read are refused by file and line") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& text, const std::string& message) {
    const std::string path = folder.write("m.jsonl", text);
    require_error(ErrorKind::kData, {message}, {"metrics.jsonl of a run"}, [&] { read_metrics(path); });
  };
  refused("step 1\n", "m.jsonl:1: not valid JSON");
  refused(line(1, 1) + "[]\n", "m.jsonl:2: ");
  refused(line(1, 1) + "{\"loss\":1}\n", "m.jsonl:2: not a line of metrics");
  refused(line(1, 1) + "{\"step\":\"two\"}\n", "m.jsonl:2: not a line of metrics");
  refused(line(1, 1) + "{\"step\":1.5}\n", "m.jsonl:2: step");
  refused(line(1, 1) + std::string(100000, '[') + "\n", "m.jsonl:2: more than 64 levels deep");
  require_error(ErrorKind::kData, {"nowhere.jsonl", "No such file"}, [&] { read_metrics(folder / "nowhere.jsonl"); });
}

TEST_CASE("Metrics without a loss in common prove nothing") {
  const auto rates = [] { return table_of("{\"step\":1,\"lr\":0.5,\"tokens\":8}\n"); };
  require_error(ErrorKind::kConfig, {"no step with a loss in common"}, [&] { compare_metrics(rates(), rates(), {}); });
  require_error(ErrorKind::kConfig, {"no step with a loss in common"}, [] { compare_metrics({}, {}, {}); });
}

TEST_CASE("Metrics without a finite loss prove nothing; steps left out beside such a loss are equal") {
  const std::string left_out = "{\"step\":1,\"loss\":null,\"lr\":0.5}\n";
  const MetricsTable none = table_of(left_out), some = table_of(left_out + line(2, 1));
  for (const Tolerance& tolerance : {Tolerance{}, Tolerance{0, 0, true}}) {
    const MetricsDifference found = compare_metrics(none, none, tolerance);
    CHECK_FALSE(found.inside());
    CHECK(describe(found).back() == "no step has a finite loss in both: nothing is compared");
    CHECK(compare_metrics(some, some, tolerance).inside());
  }
}

TEST_CASE("Hashes that are none are refused by file and line") {
  const TemporaryFolder folder;
  for (const char* hash : {"{}", "{\"weights\":7}", "{\"weights\":[]}", "\"abc\"", "[]"}) {
    const std::string path = folder.write("m.jsonl", line(1, 1) + line(2, 1, format(",\"state_hash\":{}", hash)));
    require_error(ErrorKind::kData, {"m.jsonl:2: state_hash"}, [&] { read_digests(path); });
  }
}

TEST_CASE("Metrics that are a pipe are refused at once") {
  const TemporaryFolder folder;
  REQUIRE(::mkfifo((folder / "metrics.jsonl").c_str(), 0600) == 0);
  require_error(ErrorKind::kData, {"not a regular file"}, [&] { read_metrics(folder / "metrics.jsonl"); });
}
