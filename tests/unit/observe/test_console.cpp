#include <limits>
#include <set>

#include "observe/console.h"
#include "support/catch.h"

using namespace invar;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

StepMetrics sample_step() {
  StepMetrics metrics;
  metrics.step = 12;
  metrics.steps_total = 1000;
  metrics.loss = 5.54123;
  metrics.grad_norm = 1.2341;
  metrics.lr = 3e-4;
  metrics.step_ms = 45.2;
  metrics.tokens_per_s = 12345;
  return metrics;
}

// The part of a step's line between its separators, by number.
std::string column(const std::string& line, int number) {
  size_t begin = 0;
  for (; number > 0; --number) begin = line.find(" | ", begin) + 3;
  return line.substr(begin, line.find(" | ", begin) - begin);
}

}  // namespace

TEST_CASE("The line of a step") {
  CHECK(console_line(sample_step(), 754) ==
        "step   12/1000 | loss 5.5412 | grad norm 1.234 | lr 3.00e-04 | 12.3k tok/s |   45 ms | left 0:12:34");
}

TEST_CASE("The line of an evaluation") {
  CHECK(console_line(EvaluationMetrics{12, 1000, 5.54123, 37}) ==
        "step   12/1000 | validation loss 5.5412 | perplexity 255.0 | 37 samples");
  CHECK(console_line(EvaluationMetrics{1000, 1000, kNaN, 1}) ==
        "step 1000/1000 | validation loss    nan | perplexity   nan | 1 samples");
}

TEST_CASE("A step and an evaluation without counted tokens have no loss in their lines") {
  StepMetrics metrics = sample_step();
  metrics.loss.reset();
  CHECK(column(console_line(metrics, 754), 1) == "loss   none");
  CHECK(console_line(EvaluationMetrics{12, 1000, {}, 37}) ==
        "step   12/1000 | no validation loss: of 37 samples no token counts");
}

TEST_CASE("Each number keeps its width over all sizes") {
  struct Case {
    double value;
    const char *loss, *grad_norm, *tokens_per_s, *step_ms;
  };
  const std::vector<Case> cases{
      {0.0, "loss 0.0000", "grad norm 0.000", "    0 tok/s", " 0.0 ms"},
      {0.123456, "loss 0.1235", "grad norm 0.123", "    0 tok/s", " 0.1 ms"},
      {9.99996, "loss 10.000", "grad norm 10.00", "   10 tok/s", "  10 ms"},
      {11.9318, "loss 11.932", "grad norm 11.93", "   12 tok/s", "  12 ms"},
      {123.456, "loss 123.46", "grad norm 123.5", "  123 tok/s", " 123 ms"},
      {999.4, "loss 999.40", "grad norm 999.4", "  999 tok/s", " 999 ms"},
      {999.6, "loss 999.60", "grad norm 999.6", "1.00k tok/s", "1000 ms"},
      {9876.5, "loss 9876.5", "grad norm 9876.", "9.88k tok/s", "9876 ms"},
      {12345.6, "loss 12346.", "grad norm 1e+04", "12.3k tok/s", "12.35 s"},
      {99960.0, "loss 99960.", "grad norm 1e+05", " 100k tok/s", "99.96 s"},
      {4.5e6, "loss  4e+06", "grad norm 4e+06", "4.50M tok/s", "4500. s"},
      {kNaN, "loss    nan", "grad norm   nan", "  nan tok/s", "  nan s"},
      {std::numeric_limits<double>::infinity(), "loss    inf", "grad norm   inf", "  inf tok/s", "  inf s"},
  };
  for (const auto& [value, loss, grad_norm, tokens_per_s, step_ms] : cases) {
    StepMetrics metrics = sample_step();
    metrics.loss = metrics.grad_norm = metrics.tokens_per_s = metrics.step_ms = value;
    const std::string line = console_line(metrics, 0);
    INFO(line);
    CHECK(column(line, 1) == loss);
    CHECK(column(line, 2) == grad_norm);
    CHECK(column(line, 4) == tokens_per_s);
    CHECK(column(line, 5) == step_ms);
    CHECK(line.size() == console_line(sample_step(), 0).size());
  }
}

TEST_CASE("Steps are aligned to the width of the last one") {
  StepMetrics metrics = sample_step();
  metrics.steps_total = 20000;
  std::set<size_t> lengths;
  for (const int64_t step : {1, 99, 12345, 20000}) {
    metrics.step = step;
    lengths.insert(console_line(metrics, 0).size());
  }
  CHECK(lengths.size() == 1);
  CHECK(column(console_line(metrics, 0), 0) == "step 20000/20000");
  metrics.step = 1;
  CHECK(column(console_line(metrics, 0), 0) == "step     1/20000");
}

TEST_CASE("Time left") {
  const auto left = [](double seconds) { return column(console_line(sample_step(), seconds), 6); };
  CHECK(left(0) == "left 0:00:00");
  CHECK(left(59.6) == "left 0:01:00");
  CHECK(left(3599.4) == "left 0:59:59");
  CHECK(left(100 * 3600 + 61) == "left 100:01:01");
  CHECK(left(kNaN) == "left -:--:--");
  CHECK(left(std::numeric_limits<double>::infinity()) == "left -:--:--");
}
