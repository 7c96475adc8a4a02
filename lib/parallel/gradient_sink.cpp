#include "parallel/gradient_sink.h"

namespace invar {

void check_product(const Weight& weight, Range tokens, const Tensor& a, const Tensor& b) {
  INVAR_CHECK(a.dim(0) == tokens.size() && b.dim(0) == tokens.size() && !weight.vector && !weight.lookups_only,
              "'{}': a product of {} and {} for {} tokens", weight.name, a.describe(), b.describe(), tokens.size());
}

}  // namespace invar
