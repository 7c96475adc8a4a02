#pragma once

#include <cstdint>
#include <span>

namespace invar::app {

// One step of a tensor core, sum + Σ a·b, as published models of them have it (arXiv 2512.07004; MMA-Sim). Every term,
// the sum among them, is cut off below 2^(emax − F), where emax is the largest exponent of a term. Products are not
// normalised. The terms are added exactly, and the result is cut off to fp32. a and b are bf16 values, normal or zero,
// as many of each, at most 32; sum and result are normal or zero. F is `fraction`, at most 30.
float tensor_core_step(float sum, std::span<const float> a, std::span<const float> b, int fraction);

}  // namespace invar::app
