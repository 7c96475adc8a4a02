#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/range.h"
#include "device/arena.h"
#include "ops/logical_index.h"

namespace invar {

// Rows `global` of a logical tensor's sharded dim lie at rows [local, local + global.size()) of a weight's storage.
struct RowRun {
  Range global;
  int64_t local = 0;
};

enum class Init : uint8_t { kNormal, kOnes };

// A logical tensor (Hugging Face name and shape) and the part of it that this rank holds. Storage is unit-major: the
// sharded dim is the slow one, so any run of units is a run of rows. A tensor that is sharded on its last dim
// (row-parallel) is stored transposed: a row of storage is a block of columns (one, unless column_block says more), its
// elements being those of logical row 0, then of row 1, ...
struct Parameter {
  std::string name;
  std::vector<int64_t> shape;  // one or two dims
  bool transposed = false;     // stored (shape[1] / column_block, shape[0] · column_block)
  int64_t column_block = 1;    // of a transposed one
  Init init = Init::kNormal;
  int64_t zero_row = -1;  // logical row that starts at zero whatever init says: Hugging Face's padding_idx; −1: none
  std::vector<RowRun> runs;
  Communicator* replicas = nullptr;  // the ranks of one model replica that hold the same rows; null: this one alone
  bool partial_gradient = false;     // each replica's gradient is a part of it (SumPolicy::set_copies)
  bool trained = true;  // false: a constant of the checkpoint; nothing adds to its gradient, zero in all buffers

  int64_t rows() const { return transposed ? shape[1] / column_block : shape[0]; }  // of the unit-major form
  int64_t cols() const { return shape.size() == 1 ? 1 : (transposed ? shape[0] * column_block : shape[1]); }
  int64_t numel() const { return rows() * cols(); }
  // Index in the logical tensor, row-major, of an element of the unit-major form.
  ops::LogicalIndex logical_index() const {
    if (!transposed) return {0, cols(), cols(), 0};
    return {0, column_block, column_block, shape[1]};
  }
  int64_t logical_index(int64_t row, int64_t col) const { return logical_index().at(row, col); }
  // Of several copies in a replica the first rank's is the owner's: it alone has an optimizer state of these rows,
  // counts them in norms and hashes, and sends the others their new values.
  bool counted() const { return replicas == nullptr || replicas->rank() == 0; }
};

// What the gradient of a vector (a norm's weight) is a sum over, as its layer makes it.
struct VectorSum {
  enum class Over : uint8_t { kTokens, kHeads, kSamples };
  Over over = Over::kSamples;  // kSamples: the layer sums over the tokens of a sample
  // Of kHeads: heads of this rank, and how many of each rank's are counted: all, or none if they are copies.
  int64_t held = 0;
  std::vector<int64_t> counted{};
};

using WeightId = int;

// Storage for one matrix product or norm: rows × cols, holding one or more parameters as runs of rows.
struct Weight {
  std::string name;  // for messages and tables
  int64_t rows = 0;
  int64_t cols = 0;
  bool decay = true;                  // weight decay applies: tensors of two or more dims
  int users = 1;                      // layers that add to its gradient in a micro-batch
  std::optional<VectorSum> vector{};  // of a vector that is trained
  bool lookups_only = false;          // no product ever adds to its gradient; false if unknown
  std::vector<Parameter> parameters;

  int64_t offset = 0;        // first element in the flat buffers
  Tensor value;              // (rows, cols) or (rows), the working dtype
  Tensor gradient;           // the same shape, f32
  int64_t second_user = -1;  // first element of the second user's gradient, if it is kept apart
  Range elements() const { return {offset, offset + rows * cols}; }
  // Held by every rank of the replica, whole: norms.
  bool fully_replicated() const;
  // Of its parameters on all ranks together.
  int64_t logical_elements() const;
};

// A weight and the layer that uses it: 0 the first, 1 the second (tied embeddings), whose gradients may be kept apart.
struct WeightUse {
  WeightUse(WeightId weight, int user_of_weight = 0) : id(weight), user(user_of_weight) {}
  bool operator==(const WeightUse&) const = default;
  WeightId id;
  int user;
};

// Which gradient buffers a table has.
struct GradientLayout {
  int buffers = 1;              // as large as the flat buffer, each
  bool separate_users = false;  // the second user of a weight has a place of its own in each, behind the flat part
};

// Every weight of this rank, laid out in two flat buffers (values, gradients). Collectives and the optimizer work on
// ranges of the flat buffers; layers on the weights.
class ParameterTable {
 public:
  // Before allocate(). Rows without a parameter (padding) start at zero and stay zero.
  WeightId add(Weight weight);
  // Before allocate(): a second layer uses the weight. Returns its use. Error{kFault} for a third one.
  WeightUse add_user(WeightId id);
  // A tensor that files of this model may carry though the model does not use it.
  void add_unused(std::string name) { unused_.insert(std::move(name)); }
  const std::set<std::string>& unused() const { return unused_; }

  // Lays out and cuts the buffers from the arenas. Order: first those with replicas on every rank, so that gradients to
  // be summed over a group are neighbours, then as added: that in which a forward pass wants them.
  // The first gradient buffer is flat_gradients().
  void allocate(Arena& values, Arena& gradients, DType dtype, const GradientLayout& layout = {});

  const Weight& weight(WeightId id) const { return weights_[static_cast<size_t>(id)]; }
  const std::vector<Weight>& weights() const { return weights_; }
  // Weights in the order of their offsets.
  const std::vector<WeightId>& layout() const { return layout_; }
  int64_t flat_size() const { return flat_size_; }
  const Tensor& flat_values() const { return flat_values_; }
  const Tensor& flat_gradients() const { return flat_gradients_; }
  int gradient_buffers() const { return static_cast<int>(gradient_buffers_.size()); }
  // Elements of one of the gradient buffers, in the flat part or beyond.
  Tensor gradients(int buffer, Range elements) const {
    return gradient_buffers_[static_cast<size_t>(buffer)].rows(elements.begin, elements.end);
  }
  // With those of second users.
  const Tensor& gradients(int buffer) const { return gradient_buffers_[static_cast<size_t>(buffer)]; }
  // Of a weight and a user of it, in the weight's shape.
  Tensor gradient(const WeightUse& use, int buffer) const;
  // As many elements as the weight's, in its shape.
  Tensor shaped(WeightId id, const Tensor& flat) const;

  // Calls visit(weight, parameter, run, elements) for each run; `elements` is its range in the flat buffers.
  using RunVisitor = std::function<void(const Weight&, const Parameter&, const RowRun&, Range elements)>;
  void for_each_run(const RunVisitor& visit) const;

  static constexpr int64_t kAlignment = 64;  // elements; weights start on it

 private:
  std::vector<Weight> weights_;
  std::vector<WeightId> layout_;
  std::set<std::string> unused_;
  int64_t flat_size_ = 0;
  Tensor flat_values_;
  Tensor flat_gradients_;
  std::vector<Tensor> gradient_buffers_;
};

// Fills the values with the run's initial weights: normal(0, std) keyed by (seed, name, element index in the logical
// tensor), or ones. The same bits at every layout.
void initialise(const ParameterTable& table, const Stream& stream, uint64_t seed, double std);

}  // namespace invar
