#pragma once

#include <utility>

#include "parallel/parameter.h"

namespace invar {

class WeightStore;

// A weight's values while a layer uses them in one pass: its end is their release. Move-only.
class HeldWeight {
 public:
  HeldWeight(WeightStore& store, WeightId id, const Tensor& value) : store_(&store), id_(id), value_(value) {}
  HeldWeight(HeldWeight&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)), id_(other.id_), value_(other.value_) {}
  HeldWeight& operator=(HeldWeight&&) = delete;
  ~HeldWeight();

  // As the layer sees the weight: (rows, cols) or (rows), the working dtype. What a rank stores may be fewer rows.
  const Tensor& value() const { return value_; }

 private:
  WeightStore* store_;
  WeightId id_;
  Tensor value_;
};

enum class Pass : uint8_t { kForward, kBackward };

// Where layers get weights. A store may keep them whole, as ResidentWeights, or bring them when they are used.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  // The values, complete in the order of the device's queue. A pass may hold a weight several times.
  virtual HeldWeight use(WeightId id, Pass pass) = 0;

 private:
  friend class HeldWeight;
  // What is queued from now on does not read these values.
  virtual void release(WeightId id) = 0;
};

inline HeldWeight::~HeldWeight() {
  if (store_ != nullptr) store_->release(id_);
}

// Who brings new values from other ranks after an update.
class ValueSource {
 public:
  virtual ~ValueSource() = default;
  // What is queued from now on finds the new values of this weight.
  virtual void await_values(WeightId id) = 0;
};

// Every weight that a layer uses, whole and always there.
class ResidentWeights : public WeightStore {
 public:
  // source: null if values never come from elsewhere. Both outlive this.
  explicit ResidentWeights(const ParameterTable& table, ValueSource* source = nullptr)
      : table_(table), source_(source) {}

  HeldWeight use(WeightId id, Pass /*pass*/) override {
    if (source_ != nullptr) source_->await_values(id);
    return {*this, id, table_.weight(id).value};
  }

 private:
  void release(WeightId /*id*/) override {}

  const ParameterTable& table_;
  ValueSource* source_;
};

}  // namespace invar
