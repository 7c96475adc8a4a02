#include "device_tensor.h"

namespace invar {
namespace {

using namespace invar::test;

TEST_CASE("bytes go to the GPU and come back") {
  const int64_t n = GENERATE(1, 1000, 3 << 20);
  const HostTensor host = random_tensor(DType::kF32, {n}, 1);
  const DeviceTensor device(host);
  CHECK(device.host().same_bits(host));
  HostTensor once(DType::kF32, {n});
  copy_across(gpu(), device, once);
  CHECK(once.same_bits(host));
}

TEST_CASE("an arena on the GPU is zeroed, and says its name when it cannot be had") {
  Arena arena("zeros", DeviceType::kCuda, 1 << 20);
  HostTensor host(DType::kF32, {1 << 18});
  copy_across(gpu(), arena.allocate("all", DType::kF32, {1 << 18}), host);
  CHECK(host.values() == std::vector<double>(1 << 18, 0.0));
  CHECK(contains(message_of(ErrorKind::kFault, [] { Arena("too large", DeviceType::kCuda, int64_t{1} << 50); }),
                 "for 'too large'"));
}

TEST_CASE("a GPU that is not there is refused") {
  CHECK(contains(message_of(ErrorKind::kConfig, [] { make_cuda_stream(cuda_device_count()); }), "is wanted"));
}

TEST_CASE("a queue beside a stream is another one of the same device") {
  const Stream beside = queue_beside(gpu());
  CHECK(&beside.cuda() != &gpu().cuda());
  CHECK(beside.threads() == gpu().threads());
}

}  // namespace
}  // namespace invar
