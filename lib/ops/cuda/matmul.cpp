#include "ops/matmul.h"

#include <cublasLt.h>

#include <bit>
#include <cmath>
#include <map>
#include <vector>

#include "core/format.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/operations.h"

// Products through cuBLASLt. An algorithm may be used if it sums over k in one pass: then bits do not depend on how
// blocks are scheduled. The fastest is looked for by the clock, among those that give the bits of the first: then bits
// do not depend on the choice either.
namespace invar::ops::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;
constexpr int kRequested = 32;                      // algorithms asked for, of which the first
constexpr size_t kCandidates = 8;                   // that may be used are kept
constexpr double kTunedFlop = 1e9;                  // smaller products take the heuristics' first choice
constexpr int64_t kTuningBytes = int64_t{1} << 30;  // of a c that stands in for one that is added to
constexpr int kTimedRuns = 3;
constexpr int64_t kCompared = 256 << 10;

void check_cublas(cublasStatus_t status, std::string_view call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorKind::kFault, format("{}: {}", call, cublasLtGetStatusString(status)));
}

using Handle = UniqueHandle<cublasLtHandle_t, cublasLtDestroy>;
using MatmulDesc = UniqueHandle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = UniqueHandle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = UniqueHandle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using Event = UniqueHandle<cudaEvent_t, cudaEventDestroy>;
using Candidates = std::vector<cublasLtMatmulHeuristicResult_t>;

// What an algorithm is chosen by.
struct Key {
  int64_t m, n, k;
  bool transpose_a, transpose_b, accumulate;
  DType in, out;
  uint32_t alignment_a, alignment_b, alignment_c;

  auto operator<=>(const Key&) const = default;

  double flop() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
  std::string describe() const {
    return format("{} ({}, {}){} x ({}, {}){} -> {}", name_of(in), transpose_a ? k : m, transpose_a ? m : k,
                  transpose_a ? " transposed" : "", transpose_b ? n : k, transpose_b ? k : n,
                  transpose_b ? " transposed" : "", name_of(out));
  }
};

// Operands in device memory.
struct Operands {
  const void* a;
  const void* b;
  void* c;
  void* workspace;  // of kWorkspaceBytes
};

struct Plan {
  MatmulDesc desc;
  MatrixLayout a, b, c;
  float beta = 0;
  cublasLtMatmulAlgo_t algorithm{};
};

cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

// The largest power of two, up to cuBLASLt's 256, that divides the address.
uint32_t alignment_of(const void* pointer) {
  return 1u << std::min(8, std::countr_zero(reinterpret_cast<uintptr_t>(pointer)));
}

// A row-major (rows, columns) matrix is a column-major (columns, rows) one.
MatrixLayout make_layout(DType dtype, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), static_cast<uint64_t>(columns),
                                          static_cast<uint64_t>(rows), columns),
               "cublasLtMatrixLayoutCreate");
  return MatrixLayout(layout);
}

void set_transpose(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, bool transpose) {
  const cublasOperation_t operation = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
  check_cublas(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &operation, sizeof operation),
               "cublasLtMatmulDescSetAttribute");
}

// Column-major, cᵀ = op(b)ᵀ · op(a)ᵀ: cuBLASLt's first operand is b. Pedantic f32 never uses tensor cores.
Plan make_plan(const Key& key) {
  cublasLtMatmulDesc_t desc = nullptr;
  const auto compute = key.in == DType::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  check_cublas(cublasLtMatmulDescCreate(&desc, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
  Plan plan;
  plan.desc = MatmulDesc(desc);
  set_transpose(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b);
  set_transpose(plan.desc, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a);
  plan.a = key.transpose_a ? make_layout(key.in, key.k, key.m) : make_layout(key.in, key.m, key.k);
  plan.b = key.transpose_b ? make_layout(key.in, key.n, key.k) : make_layout(key.in, key.k, key.n);
  plan.c = make_layout(key.out, key.m, key.n);
  plan.beta = key.accumulate ? 1.0f : 0.0f;
  return plan;
}

template <class T>
void set_preference(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check_cublas(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute");
}

Preference make_preference(const Key& key) {
  cublasLtMatmulPreference_t created = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&created), "cublasLtMatmulPreferenceCreate");
  Preference preference(created);
  set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
  set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment_b);
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment_a);
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignment_c);
  set_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignment_c);
  return preference;
}

template <class T>
T attribute_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  check_cublas(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written),
               "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

bool sums_in_one_pass(const cublasLtMatmulAlgo_t& algorithm) {
  constexpr int32_t kHiddenSplits = 16;  // splits k whatever its attributes say
  const auto splits = attribute_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return attribute_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID) != kHiddenSplits && (splits == 0 || splits == 1) &&
         attribute_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == CUBLASLT_REDUCTION_SCHEME_NONE;
}

// The plans of a stream, and the library's handle.
class MatmulPlans {
 public:
  explicit MatmulPlans(CudaStream& stream) : stream_(stream) {
    cublasLtHandle_t handle = nullptr;
    check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
    handle_ = Handle(handle);
  }

  void run(const Key& key, const Operands& operands) {
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      Plan plan = make_plan(key);
      const Candidates usable = candidates(key, plan);
      const bool tuned = usable.size() > 1 && key.flop() >= kTunedFlop;
      plan.algorithm = tuned ? fastest(key, plan, usable, operands) : usable.front().algo;
      found = plans_.emplace(key, std::move(plan)).first;
    }
    const cublasStatus_t status = launch(found->second, found->second.algorithm, operands);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(ErrorKind::kFault,
                format("matmul {}: cublasLtMatmul: {}", key.describe(), cublasLtGetStatusString(status)));
  }

 private:
  cublasStatus_t launch(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& operands) const {
    const float alpha = 1.0f;
    return cublasLtMatmul(handle_.get(), plan.desc.get(), &alpha, operands.b, plan.b.get(), operands.a, plan.a.get(),
                          &plan.beta, operands.c, plan.c.get(), operands.c, plan.c.get(), &algorithm,
                          operands.workspace, size_t{kWorkspaceBytes}, stream_.handle());
  }

  // Best first by cuBLASLt's estimate; at least one.
  Candidates candidates(const Key& key, const Plan& plan) const {
    const Preference preference = make_preference(key);
    Candidates all(kRequested), usable;
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle_.get(), plan.desc.get(), plan.b.get(), plan.a.get(), plan.c.get(),
                                       plan.c.get(), preference.get(), kRequested, all.data(), &count);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
    all.resize(static_cast<size_t>(count));
    for (const auto& candidate : all) {
      const bool fits = candidate.state == CUBLAS_STATUS_SUCCESS && candidate.workspaceSize <= size_t{kWorkspaceBytes};
      if (fits && usable.size() < kCandidates && sums_in_one_pass(candidate.algo)) usable.push_back(candidate);
    }
    if (!usable.empty()) return usable;
    throw Error(ErrorKind::kFault,
                format("matmul {}, beta {}, aligned to {}, {} and {} bytes: cuBLASLt has no "
                       "algorithm that sums in one pass (of {} it offers)",
                       key.describe(), plan.beta, key.alignment_a, key.alignment_b, key.alignment_c, count));
  }

  // By the clock, once. A c that is only written may be written several times; one that is added to is stood in for,
  // and if that is too large, nothing is measured.
  cublasLtMatmulAlgo_t fastest(const Key& key, const Plan& plan, const Candidates& usable, Operands operands) const {
    void* stand_in = nullptr;
    if (key.accumulate) {
      const int64_t bytes = key.m * key.n * size_of(key.out);
      if (bytes > kTuningBytes) return usable.front().algo;
      if (cudaMallocAsync(&stand_in, static_cast<size_t>(bytes), stream_.handle()) != cudaSuccess) {
        cudaGetLastError();  // not for the next call to find
        return usable.front().algo;
      }
      operands.c = stand_in;
    }
    size_t best = 0;
    float least = INFINITY;
    std::vector<std::byte> expected;
    for (size_t i = 0; i < usable.size(); ++i) {
      if (stand_in != nullptr) clear(stand_in, key);
      if (launch(plan, usable[i].algo, operands) != CUBLAS_STATUS_SUCCESS) continue;
      const std::vector<std::byte> bits = both_ends(operands.c, key);
      if (expected.empty()) expected = bits;
      if (bits != expected) continue;
      const float time = milliseconds(plan, usable[i].algo, operands);
      if (time < least) {
        least = time;
        best = i;
      }
    }
    if (stand_in != nullptr) check_cuda(cudaFreeAsync(stand_in, stream_.handle()), "cudaFreeAsync");
    return usable[best].algo;
  }

  void clear(void* c, const Key& key) const {
    const auto bytes = static_cast<size_t>(key.m * key.n * size_of(key.out));
    check_cuda(cudaMemsetAsync(c, 0, bytes, stream_.handle()), "cudaMemsetAsync");
  }

  // The first and the last kCompared bytes of c: an algorithm that sums otherwise differs almost everywhere.
  std::vector<std::byte> both_ends(const void* c, const Key& key) const {
    const int64_t bytes = key.m * key.n * size_of(key.out);
    const auto part = static_cast<size_t>(std::min(kCompared, bytes));
    std::vector<std::byte> ends(2 * part);
    const auto* from = static_cast<const std::byte*>(c);
    for (const auto& [to, at] : {std::pair{ends.data(), from}, {ends.data() + part, from + bytes - part}}) {
      check_cuda(cudaMemcpyAsync(to, at, part, cudaMemcpyDeviceToHost, stream_.handle()), "cudaMemcpyAsync");
    }
    check_cuda(cudaStreamSynchronize(stream_.handle()), "cudaStreamSynchronize");
    return ends;
  }

  // Mean of kTimedRuns of an algorithm that has run.
  float milliseconds(const Plan& plan, const cublasLtMatmulAlgo_t& algorithm, const Operands& operands) const {
    const Event begin = make_event(), end = make_event();
    check_cuda(cudaEventRecord(begin.get(), stream_.handle()), "cudaEventRecord");
    for (int i = 0; i < kTimedRuns; ++i) check_cublas(launch(plan, algorithm, operands), "cublasLtMatmul");
    check_cuda(cudaEventRecord(end.get(), stream_.handle()), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
    float time = 0;
    check_cuda(cudaEventElapsedTime(&time, begin.get(), end.get()), "cudaEventElapsedTime");
    return time;
  }

  static Event make_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreate(&event), "cudaEventCreate");
    return Event(event);
  }

  CudaStream& stream_;
  Handle handle_;
  std::map<Key, Plan> plans_;
};

}  // namespace

void matmul(const Stream& stream, const Tensor& a, Transpose transpose_a, const Tensor& b, Transpose transpose_b,
            const Tensor& c, float beta) {
  if (c.empty()) return;
  const bool ta = transpose_a == Transpose::kYes;
  const int64_t k = a.dim(ta ? 0 : 1);
  if (k == 0) {
    if (beta != 0.0f) return;
    check_cuda(cudaMemsetAsync(c.raw(), 0, static_cast<size_t>(c.bytes()), cuda_handle(stream)), "cudaMemsetAsync");
    return;
  }
  CudaStream& cuda = stream.cuda();
  // cuBLASLt has no product of f32 in bf16: it is made in f32, which rounds as exactly.
  const bool narrowed = a.dtype() == DType::kF32 && c.dtype() == DType::kBF16;
  auto* workspace = static_cast<std::byte*>(cuda.workspace(kWorkspaceBytes + (narrowed ? c.numel() * 4 : 0)));
  const Tensor product = narrowed ? Tensor(workspace + kWorkspaceBytes, DType::kF32, c.device(), c.shape()) : c;
  const Key key{c.dim(0),
                c.dim(1),
                k,
                ta,
                transpose_b == Transpose::kYes,
                beta != 0.0f,
                a.dtype(),
                product.dtype(),
                alignment_of(a.raw()),
                alignment_of(b.raw()),
                alignment_of(product.raw())};
  cuda.attachment<MatmulPlans>().run(key, {a.raw(), b.raw(), product.raw(), workspace});
  if (narrowed) copy(stream, product, c);
}

}  // namespace invar::ops::cuda
