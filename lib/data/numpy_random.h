#pragma once

#include <bit>
#include <cstdint>
#include <random>
#include <span>
#include <utility>

namespace invar {

// numpy.random.RandomState(seed) as far as Megatron uses it. std::mt19937 is the same generator with the same seeding;
// the shuffle draws its bounded numbers by masking and rejection, as numpy's legacy generator does.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(uint32_t seed) : generator_(seed) {}

  template <class T>
  void shuffle(std::span<T> values) {
    for (size_t i = values.size(); i-- > 1;) {
      std::swap(values[i], values[up_to(static_cast<uint32_t>(i))]);
    }
  }

 private:
  uint32_t up_to(uint32_t maximum) {  // uniform in [0, maximum]
    const uint32_t mask = ~uint32_t{0} >> std::countl_zero(maximum);
    while (true) {
      const uint32_t value = static_cast<uint32_t>(generator_()) & mask;
      if (value <= maximum) return value;
    }
  }

  std::mt19937 generator_;
};

}  // namespace invar
