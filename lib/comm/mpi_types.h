#pragma once

#include <array>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include "comm/mpi_waiting.h"
#include "core/dtype.h"
#include "core/error.h"

// MPI's codes, types and ranks in terms of ours. Private to mpi_communicator.cpp.
namespace invar {

inline std::string mpi_error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return format("MPI error {}", code);
  return std::string(text.data(), static_cast<size_t>(length));
}

inline void check_start(int code, std::string_view call) {
  if (code != MPI_SUCCESS) throw Error(ErrorKind::kFault, format("{}: {}", call, mpi_error_text(code)));
}

// MPI objects may be freed between start and finalise only. Freeing a communicator is collective, so a rank that
// unwinds must not try: its peers will not come.
inline bool may_free() {
  int finalised = 0;
  MPI_Finalized(&finalised);
  return finalised == 0 && std::uncaught_exceptions() == 0;
}

// The element types, with the one that MPI lacks.
class MpiTypes {
 public:
  MpiTypes() {
    check_start(MPI_Type_contiguous(static_cast<int>(sizeof(BF16)), MPI_BYTE, &bf16_), "MPI_Type_contiguous");
    check_start(MPI_Type_commit(&bf16_), "MPI_Type_commit");
  }
  MpiTypes(const MpiTypes&) = delete;
  MpiTypes& operator=(const MpiTypes&) = delete;
  ~MpiTypes() {
    if (may_free()) MPI_Type_free(&bf16_);
  }

  MPI_Datatype type_of(DType dtype) const {
    switch (dtype) {
      case DType::kF32:
        return MPI_FLOAT;
      case DType::kBF16:
        return bf16_;
      case DType::kF64:
        return MPI_DOUBLE;
      case DType::kI32:
        return MPI_INT32_T;
      case DType::kI64:
        return MPI_INT64_T;
    }
    return MPI_DATATYPE_NULL;
  }

 private:
  MPI_Datatype bf16_ = MPI_DATATYPE_NULL;
};

// The ranks in MPI_COMM_WORLD of all ranks of comm.
inline std::vector<int> job_ranks_of(MPI_Comm comm) {
  MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  int size = 1;
  check_start(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  check_start(MPI_Comm_group(comm, &group), "MPI_Comm_group");
  check_start(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  std::vector<int> own(static_cast<size_t>(size)), job(own);
  std::iota(own.begin(), own.end(), 0);
  check_start(MPI_Group_translate_ranks(group, size, own.data(), world, job.data()), "MPI_Group_translate_ranks");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return job;
}

}  // namespace invar
