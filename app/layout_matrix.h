#pragma once

#include <map>
#include <string>
#include <vector>

#include "config/config.h"

namespace invar::app {

// One point of the matrix that `invar parity --matrix` walks.
struct Layout {
  int tensor = 1;
  bool sequence = false;
  int data = 1;
  int64_t micro_batch = 1;
  RecomputeKind recompute = RecomputeKind::kNone;
  bool uneven = false;

  int ranks() const { return tensor * data; }
  void apply_to(Config& config) const;
  bool operator==(const Layout&) const = default;
};

struct LayoutMatrix {
  std::vector<Layout> layouts;
  std::map<std::string, int> left_out;  // layouts by the reason why they do not fit
};

// Tensor 1, 2, 3, 4, 8 × sequence × data 1, 2, 4 × micro-batch 1, 2, 4 on up to 8 ranks. Micro-batch 1 has full
// recomputation too, micro-batch 2 selective. Of these the ones that fit the config's model and numerics, the batch and
// the sequence length. A degree that cuts the model into equal parts does; one that cannot cuts it unevenly.
LayoutMatrix layout_matrix(const Config& config, int64_t batch, int64_t sequence_length);

}  // namespace invar::app
