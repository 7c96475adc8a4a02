#pragma once

// What every layer is held to: its gradients are the derivatives of its loss, and cutting it changes nothing.

#include <algorithm>

#include "layer_rig.h"
#include "support/catch.h"

namespace invar::test {

constexpr double kDerivativeTolerance = 2e-3;
constexpr double kWrong = 3 * kDerivativeTolerance;  // what controls must exceed
constexpr double kLayoutTolerance = 1e-5;
constexpr double kStep = 2e-3;  // of values of order one; fp32 leaves an error of about 2e-4

inline double dot(const Named& a, const Named& b) {
  double sum = 0;
  for (const auto& [name, values] : a) {
    for (size_t i = 0; i < values.size(); ++i) sum += values[i] * b.at(name)[i];
  }
  return sum;
}

inline double loss(const LayerCase& layer_case, const Named& point) {
  const Named outputs = combine(run(layer_case, point, {}, false).outputs);
  double sum = 0;
  for (const Slot& output : layer_case.outputs) {
    sum += dot({{output.name, outputs.at(output.name)}}, {{output.name, loss_weights(output)}});
  }
  return sum;
}

// Random, each element of order one, and turned towards the gradient: the derivative is not small, and what is missing
// from the gradient weighs as much as what is there.
inline Named direction_near(const Named& gradient, int number) {
  Named direction;
  for (const auto& [name, values] : gradient) {
    direction[name] = normal_values(format("direction {} {}", number, name), std::ssize(values));
  }
  const double length = std::sqrt(dot(gradient, gradient)) * (dot(direction, gradient) < 0 ? -1.0 : 1.0);
  for (auto& [name, values] : direction) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += gradient.at(name)[i] / length;
  }
  return direction;
}

using Restriction = std::function<void(Named& direction)>;

// |difference quotient of `truth` − derivative that the gradients of `claim` give|, relative to the latter.
inline double derivative_error(const LayerCase& truth, const Named& point, const Named& gradient,
                               const Restriction& restrict_to) {
  const double step = kStep / std::sqrt(static_cast<double>(gradient.size()));  // many matrices move it further
  double worst = 0;
  for (const int number : {0, 1}) {
    Named direction = direction_near(gradient, number);
    if (restrict_to) restrict_to(direction);
    const auto moved = [&](double length) {
      Named at = point;
      for (const auto& [name, values] : direction) {
        for (size_t i = 0; i < values.size(); ++i) at[name][i] += length * values[i];
      }
      return loss(truth, at);
    };
    const auto quotient = [&](double length) { return (moved(length) - moved(-length)) / (2 * length); };
    const double numeric = (4 * quotient(step) - quotient(2 * step)) / 3;  // without the term in step²
    const double analytic = dot(direction, gradient);
    worst = std::max(worst, std::abs(numeric - analytic) / std::abs(analytic));
  }
  return worst;
}

// The errors along all inputs and weights at once ("all") and along each alone. A layer is right if it is its own
// `claim`; another claim is the control.
inline std::map<std::string, double> derivative_errors(const LayerCase& truth, const LayerCase& claim,
                                                       const Restriction& restrict_to = {}) {
  const Named point = start_point(truth);
  const Named gradient = combine(run(claim, point, {}).gradients);
  std::map<std::string, double> errors;
  errors["all"] = derivative_error(truth, point, gradient, restrict_to);
  for (const auto& [name, values] : gradient) {
    if (dot({{name, values}}, {{name, values}}) == 0) throw std::logic_error("no gradient of " + name);
    errors[name] = derivative_error(truth, point, {{name, values}}, restrict_to);
  }
  return errors;
}

inline void check_derivatives(const LayerCase& layer_case, const Restriction& restrict_to = {}) {
  for (const auto& [name, error] : derivative_errors(layer_case, layer_case, restrict_to)) {
    INFO("along " << name);
    CHECK(error < kDerivativeTolerance);
  }
}

// Per matrix, the largest difference relative to the largest entry.
inline std::map<std::string, double> differences(const Named& actual, const Named& expected) {
  if (actual.size() != expected.size()) throw std::logic_error("other names");
  std::map<std::string, double> all;
  for (const auto& [name, values] : expected) {
    double largest = 0;
    double difference = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(values[i]));
      difference = std::max(difference, std::abs(values[i] - actual.at(name)[i]));
    }
    all[name] = largest == 0 ? difference : difference / largest;
  }
  return all;
}

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> kLayouts = {{1, true}, {2, false}, {2, true}, {3, false},
                                               {3, true}, {4, false}, {4, true}};
  return kLayouts;
}

inline void check_layouts(const LayerCase& layer_case) {
  const Named point = start_point(layer_case);
  const PassResult one = run(layer_case, point, {});
  const Named outputs = combine(one.outputs);
  const Named gradients = combine(one.gradients);
  for (const Layout& layout : layouts()) {
    INFO("tensor " << layout.tensor << ", sequence " << layout.sequence);
    const PassResult cut = run(layer_case, point, layout);
    for (const auto& [name, difference] : differences(combine(cut.outputs), outputs)) {
      INFO("output " << name);
      CHECK(difference < kLayoutTolerance);
    }
    for (const auto& [name, difference] : differences(combine(cut.gradients), gradients)) {
      INFO("gradient of " << name);
      CHECK(difference < kLayoutTolerance);
    }
  }
}

// A second micro-batch adds its gradients to those of the first.
inline void check_accumulation(const LayerCase& layer_case) {
  const Named point = start_point(layer_case);
  const Named once = combine(run(layer_case, point, {}).gradients);
  Named twice = combine(run(layer_case, point, {}, true, 2).gradients);
  for (const Slot& input : layer_case.inputs) {
    INFO("gradient of " << input.name);
    CHECK(twice.at(input.name) == once.at(input.name));
  }
  for (auto& [name, values] : twice) {
    const bool is_input = std::any_of(layer_case.inputs.begin(), layer_case.inputs.end(),
                                      [&, &wanted = name](const Slot& input) { return input.name == wanted; });
    if (is_input) continue;
    for (double& value : values) value /= 2;
    INFO("gradient of " << name);
    CHECK(differences({{name, values}}, {{name, once.at(name)}}).at(name) < kLayoutTolerance);
  }
}

}  // namespace invar::test
