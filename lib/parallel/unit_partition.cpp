#include "parallel/unit_partition.h"

#include "config/units.h"
#include "core/error.h"

namespace invar {

std::vector<Range> split_units(int64_t units, int parts) {
  INVAR_CHECK(parts > 0, "{} parts", parts);
  std::vector<Range> runs;
  for (int part = 0; part < parts; ++part) {
    runs.push_back({run_begin(units, parts, part), run_begin(units, parts, part + 1)});
  }
  return runs;
}

}  // namespace invar
