#pragma once

#include "core/dtype.h"

namespace invar::ops::cpu {

// An element in storage, read and written as float. Stores go to the bits: g++ 12 does not vectorise a loop that
// assigns a whole struct.
inline float load(float element) {
  return element;
}
inline float load(BF16 element) {
  return static_cast<float>(element);
}
inline void store(float& element, float value) {
  element = value;
}
inline void store(BF16& element, float value) {
  element.bits = BF16(value).bits;
}

}  // namespace invar::ops::cpu
