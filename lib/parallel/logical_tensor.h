#pragma once

#include <optional>
#include <span>
#include <vector>

#include "parallel/parameter.h"

namespace invar {

// A run's elements between their place in the flat buffers, (rows of the run, cols) unit-major, and the logical
// tensor, where a transposed parameter's run is a range of columns. `logical` is the whole tensor, row-major.
void copy_run_to_logical(const Parameter& parameter, const RowRun& run, std::span<const float> stored,
                         std::span<float> logical);

// The whole logical tensor as fp32, row-major, put together on rank 0 of the tensor group out of every rank's runs in
// `flat` (f32 or bf16); empty on the other ranks. Collective over the group.
std::vector<float> collect_logical(Communicator& tensor, const Stream& stream, const Tensor& flat, const Weight& weight,
                                   const Parameter& parameter);

// The whole logical tensor, row-major, put together on rank 0 of the group out of the runs that each rank gives, their
// values one after another (rows of the run, cols); empty on the other ranks. Together the runs hold every row once, on
// whatever ranks. Collective over the group.
std::vector<float> collect_runs(Communicator& group, const Stream& stream, const Parameter& parameter,
                                const std::vector<RowRun>& runs, std::vector<float> values);

// Elements of the flat buffer as fp32; f32 or bf16, on the stream's device or in host memory.
std::vector<float> read_f32(const Stream& stream, const Tensor& flat, Range elements);
// fp32 values to elements of the flat buffer, rounded to its dtype.
void write_f32(const Stream& stream, std::span<const float> values, const Tensor& flat, Range elements);

}  // namespace invar
