#include "comm/nccl_communicator.h"

// In a build without NCCL.
namespace invar {

std::unique_ptr<Communicator> make_nccl_communicator(const std::shared_ptr<Communicator>& /*host*/,
                                                     const NcclOptions& /*options*/) {
  throw Error(ErrorKind::kConfig, "several ranks on GPUs need NCCL, which this invar was built without",
              "install NCCL and build again, or set device: cpu");
}

}  // namespace invar
