#pragma once

#include <string>

#include "observe/metrics.h"

namespace invar {

// The console's line for a step. Columns keep their width over a run, so that lines stand under each other:
//   step   12/1000 | loss 5.5412 | grad norm 1.234 | lr 3.00e-04 | 12.3k tok/s |   45 ms | left 0:12:34
// A seconds_left that is not known (NaN) prints as -:--:--, a loss of no tokens as none.
std::string console_line(const StepMetrics& metrics, double seconds_left);
//   step   12/1000 | validation loss 5.5412 | perplexity 255.0 | 64 samples
//   step   12/1000 | no validation loss: of 64 samples no token counts
std::string console_line(const EvaluationMetrics& metrics);

}  // namespace invar
