#include "comm/communicator.h"

namespace invar {
namespace {

template <class T>
T reduce_value(Communicator& communicator, T value, ReduceOp op) {
  const Tensor scalar(&value, DTypeOf<T>::value, DeviceType::kCpu, {1});
  communicator.all_reduce(Stream(DeviceType::kCpu), scalar, op);
  return value;
}

}  // namespace

int64_t all_reduce_value(Communicator& communicator, int64_t value, ReduceOp op) {
  return reduce_value(communicator, value, op);
}

double all_reduce_value(Communicator& communicator, double value, ReduceOp op) {
  return reduce_value(communicator, value, op);
}

double all_reduce_value(Communicator& communicator, const ExactSum& sum) {
  auto digits = sum.digits();
  const Tensor tensor(digits.data(), DType::kI64, DeviceType::kCpu, {ExactSum::kDigits});
  communicator.all_reduce(Stream(DeviceType::kCpu), tensor, ReduceOp::kSum);
  return ExactSum::of_digits(digits).value();
}

std::vector<int64_t> equal_counts(int size, int64_t count) {
  INVAR_CHECK(size >= 1 && count >= 0, "{} parts of {} elements", size, count);
  return std::vector<int64_t>(static_cast<size_t>(size), count);
}

}  // namespace invar
