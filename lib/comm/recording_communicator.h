#pragma once

#include <map>

#include "comm/communicator.h"

namespace invar {

// What a rank would put on the wire, by group and operation.
struct Traffic {
  std::string group;
  int64_t calls = 0;
  int64_t bytes = 0;  // sent by this rank, by the ring algorithm's count for reductions and gathers
};
using TrafficTable = std::map<std::string, Traffic>;  // "tensor all_gather" -> traffic

// A rank of a group whose peers do not exist: it counts calls and bytes and moves nothing (tensors on meta). For
// `invar plan` and for sizing arenas. A host scalar (all_reduce_value) is counted and keeps its value; other tensors on
// a device are refused. It cannot split: parallel/topology computes groups from ranks alone.
std::unique_ptr<Communicator> make_recording_communicator(int rank, int size, std::string name, TrafficTable* table);

}  // namespace invar
