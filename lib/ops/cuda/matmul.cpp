#include "ops/matmul.h"

#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "core/format.h"
#include "core/integer.h"
#include "device/cuda/cuda_stream.h"
#include "ops/cuda/matmul_chain.h"
#include "ops/cuda/operations.h"
#include "ops/cuda/proof.h"

// Products through cuBLASLt. An algorithm may be used if it sums over k in one pass: then bits do not depend on how
// blocks are scheduled. The fastest is looked for by the clock, among those that give the bits of the first: then bits
// do not depend on the choice either. In invariant numerics it is one of those that were proved, each on its own
// shape, to give the bits of the fixed order, or an own kernel (f32, and bf16 where none was proved): then bits do not
// depend on the shape.
namespace invar::ops::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;
constexpr int kRequested = 32;                      // algorithms asked for, of which the first
constexpr size_t kCandidates = 8;                   // that may be used are kept
constexpr double kTunedFlop = 1e9;                  // smaller products take the heuristics' first choice
constexpr int64_t kTuningBytes = int64_t{1} << 30;  // of a c that stands in for one that is added to
constexpr int kTimedRuns = 3;
constexpr int64_t kCompared = 256 << 10;
constexpr int64_t kMostAlignment = 256;  // bytes that cuBLASLt looks at

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
  int64_t samples;  // products, whose operands and results lie one after another
  int64_t m, n, k;
  int64_t stride_a;  // elements from row to row of a as stored
  bool transpose_a, transpose_b, accumulate, invariant;
  DType in, out;
  uint32_t alignment_a, alignment_b, alignment_c;

  auto operator<=>(const Key&) const = default;

  int64_t rows_a() const { return transpose_a ? k : m; }
  // Of one product.
  int64_t elements_a() const { return rows_a() * stride_a; }
  int64_t elements_b() const { return k * n; }
  int64_t elements_c() const { return m * n; }
  double flop() const { return 2.0 * static_cast<double>(samples * elements_c()) * static_cast<double>(k); }
  int64_t bytes_c() const { return samples * elements_c() * size_of(out); }
  std::string describe() const {
    const int64_t columns = transpose_a ? m : k;
    const std::string part = stride_a == columns ? "" : format(" of {} columns", stride_a);
    const std::string times = samples == 1 ? "" : format("{} times ", samples);
    return format("{}{} ({}, {}){}{} x ({}, {}){} -> {}", times, name_of(in), rows_a(), columns, part,
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
  std::optional<cublasLtMatmulAlgo_t> algorithm;  // none: by multiply_bf16_in_order()
};

cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

// The largest power of two, up to kMostAlignment, that divides the address.
uint32_t alignment_of(const void* pointer) {
  return 1u << std::min(8, std::countr_zero(reinterpret_cast<uintptr_t>(pointer)));
}

// An address from `pointer` on that has this alignment and no better one, if it is below kMostAlignment.
std::byte* aligned(std::byte* pointer, uint32_t alignment) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
  return pointer + round_up(address, kMostAlignment) - address + alignment % kMostAlignment;
}

// A row-major (rows, columns) matrix is a column-major (columns, rows) one. `stride` elements lie from row to row, and
// of several matrices each begins where the rows of the one before end.
MatrixLayout make_layout(int64_t matrices, DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t created = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&created, cuda_type(dtype), static_cast<uint64_t>(columns),
                                          static_cast<uint64_t>(rows), stride),
               "cublasLtMatrixLayoutCreate");
  MatrixLayout layout(created);
  const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
    check_cublas(cublasLtMatrixLayoutSetAttribute(created, attribute, &value, sizeof value),
                 "cublasLtMatrixLayoutSetAttribute");
  };
  if (matrices > 1) {
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(matrices));
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t{rows * stride});
  }
  return layout;
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
  const auto layout = [&](DType dtype, int64_t rows, int64_t columns, int64_t stride) {
    return make_layout(key.samples, dtype, rows, columns, stride);
  };
  plan.a = layout(key.in, key.rows_a(), key.transpose_a ? key.m : key.k, key.stride_a);
  plan.b = key.transpose_b ? layout(key.in, key.n, key.k, key.k) : layout(key.in, key.k, key.n, key.n);
  plan.c = layout(key.out, key.m, key.n, key.n);
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

OrderedProduct ordered_product(const Key& key, const Operands& operands, int64_t sample) {
  const auto on_device = [&](const void* data, int64_t elements, DType dtype, int64_t rows, int64_t columns) {
    auto* const first = static_cast<std::byte*>(const_cast<void*>(data)) + sample * elements * size_of(dtype);
    return Tensor(first, dtype, DeviceType::kCuda, {rows, columns});
  };
  return {
      on_device(operands.a, key.elements_a(), key.in, key.rows_a(), key.stride_a),
      {0, key.transpose_a ? key.m : key.k},
      key.transpose_a,
      on_device(operands.b, key.elements_b(), key.in, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n),
      key.transpose_b,
      on_device(operands.c, key.elements_c(), key.out, key.m, key.n),
      key.accumulate};
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
      plan.algorithm = choose(key, plan, operands);
      found = plans_.emplace(key, std::move(plan)).first;
    }
    if (!found->second.algorithm) {
      for (int64_t sample = 0; sample < key.samples; ++sample) {
        multiply_bf16_in_order(stream_, ordered_product(key, operands, sample));
      }
      return;
    }
    const cublasStatus_t status = launch(found->second, *found->second.algorithm, operands);
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

  // Best first by cuBLASLt's estimate; at least one, unless the order is fixed.
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
    if (!usable.empty() || key.invariant) return usable;
    throw Error(ErrorKind::kFault,
                format("matmul {}, beta {}, aligned to {}, {} and {} bytes: cuBLASLt has no "
                       "algorithm that sums in one pass (of {} it offers)",
                       key.describe(), plan.beta, key.alignment_a, key.alignment_b, key.alignment_c, count));
  }

  std::optional<cublasLtMatmulAlgo_t> choose(const Key& key, const Plan& plan, const Operands& operands) {
    const Candidates usable = candidates(key, plan);
    const bool timed = usable.size() > 1 && key.flop() >= kTunedFlop;
    if (!key.invariant) return timed ? fastest_agreeing(key, plan, usable, operands) : usable.front().algo;
    const auto algorithm = usable.empty() ? std::nullopt : proved(key, plan, usable, timed, operands);
    auto& record = stream_.attachment<ProofRecord>();
    if (algorithm) {
      ++record.products;
    } else {
      record.slow_products.push_back(format("{}{}, aligned to {}, {} and {} bytes", key.describe(),
                                            key.accumulate ? ", added" : "", key.alignment_a, key.alignment_b,
                                            key.alignment_c));
    }
    return algorithm;
  }

  // Of those that are right(algorithm), which runs it once, the fastest by the clock, or the first if not timed.
  template <class Right>
  std::optional<cublasLtMatmulAlgo_t> fastest(const Plan& plan, const Candidates& usable, bool timed,
                                              const Operands& operands, Right&& right) const {
    std::optional<cublasLtMatmulAlgo_t> best;
    float least = INFINITY;
    for (const auto& candidate : usable) {
      if (!right(candidate.algo)) continue;
      if (!timed) return candidate.algo;
      const float time = milliseconds(plan, candidate.algo, operands);
      if (time < least) {
        least = time;
        best = candidate.algo;
      }
    }
    return best;
  }

  // The fastest of those that give the bits of the first. A c that is only written may be written several times; one
  // that is added to is stood in for, and if that is too large, nothing is measured.
  cublasLtMatmulAlgo_t fastest_agreeing(const Key& key, const Plan& plan, const Candidates& usable,
                                        Operands operands) const {
    std::optional<Scratch> stand_in;
    if (key.accumulate) {
      if (key.bytes_c() > kTuningBytes) return usable.front().algo;
      stand_in.emplace(stream_.handle(), key.bytes_c());
      if (stand_in->data() == nullptr) return usable.front().algo;
      operands.c = stand_in->data();
    }
    std::vector<std::byte> expected;
    const auto agrees = [&](const cublasLtMatmulAlgo_t& algorithm) {
      if (key.accumulate) fill(operands.c, 0, key);
      if (launch(plan, algorithm, operands) != CUBLAS_STATUS_SUCCESS) return false;
      const std::vector<std::byte> bits = both_ends(operands.c, key);
      if (expected.empty()) expected = bits;
      return bits == expected;
    };
    return fastest(plan, usable, true, operands, agrees).value_or(usable.front().algo);
  }

  // The fastest of those that give the bits of the fixed order, on operands made for the proof, of the plan's shape,
  // row strides and alignment; none if no one does. A c that is only written serves itself.
  std::optional<cublasLtMatmulAlgo_t> proved(const Key& key, const Plan& plan, const Candidates& usable, bool timed,
                                             Operands operands) {
    const int64_t bytes_a = key.samples * key.elements_a() * size_of(key.in);
    const int64_t bytes_b = key.samples * key.elements_b() * size_of(key.in);
    const Proof proof(stream_, product_proof_bytes(bytes_a, bytes_b, key.accumulate ? key.bytes_c() : 0),
                      format("matmul {} sums in the order of invariant numerics", key.describe()));
    auto* a = aligned(proof.memory(), key.alignment_a);
    auto* b = aligned(a + bytes_a, key.alignment_b);
    operands.a = a;
    operands.b = b;
    if (key.accumulate) operands.c = aligned(b + bytes_b, key.alignment_c);
    std::vector<OrderedProduct> products;
    for (int64_t sample = 0; sample < key.samples; ++sample) products.push_back(ordered_product(key, operands, sample));
    const auto in_order = [&](const cublasLtMatmulAlgo_t& algorithm) {
      fill(operands.c, 0xff, key);  // NaN: what is not written shows
      for (size_t sample = 0; sample < products.size(); ++sample) {
        fill_for_comparison(stream_, products[sample], sample);
      }
      return launch(plan, algorithm, operands) == CUBLAS_STATUS_SUCCESS &&
             std::ranges::all_of(
                 products, [&](const OrderedProduct& product) { return count_out_of_order(stream_, product) == 0; });
    };
    return fastest(plan, usable, timed, operands, in_order);
  }

  void fill(void* c, int byte, const Key& key) const {
    check_cuda(cudaMemsetAsync(c, byte, static_cast<size_t>(key.bytes_c()), stream_.handle()), "cudaMemsetAsync");
  }

  // The first and the last kCompared bytes of c: an algorithm that sums otherwise differs almost everywhere.
  std::vector<std::byte> both_ends(const void* c, const Key& key) const {
    const int64_t bytes = key.bytes_c();
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

// Of the columns of a as stored only those from `first_column` on are there. op(a) is (m, k).
struct Shape {
  int64_t samples, m, n, k;
  int64_t first_column;
};

void multiply(const Stream& stream, const Shape& shape, const Tensor& a, bool transpose_a, const Tensor& b,
              bool transpose_b, const Tensor& c, bool accumulate, const Numerics& numerics) {
  CudaStream& cuda = stream.cuda();
  const void* first = static_cast<const std::byte*>(a.raw()) + shape.first_column * size_of(a.dtype());
  // cuBLASLt has no product of f32 in bf16: it is made in f32, which rounds as exactly.
  const bool narrowed = a.dtype() == DType::kF32 && c.dtype() == DType::kBF16;
  auto* workspace = static_cast<std::byte*>(cuda.workspace(kWorkspaceBytes + (narrowed ? c.numel() * 4 : 0)));
  const Tensor product = narrowed ? Tensor(workspace + kWorkspaceBytes, DType::kF32, c.device(), c.shape()) : c;
  const Key key{shape.samples,
                shape.m,
                shape.n,
                shape.k,
                a.dim(1),
                transpose_a,
                transpose_b,
                accumulate,
                numerics.invariant,
                a.dtype(),
                product.dtype(),
                alignment_of(first),
                alignment_of(b.raw()),
                alignment_of(product.raw())};
  cuda.attachment<MatmulPlans>().run(key, {first, b.raw(), product.raw(), workspace});
  if (narrowed) copy(stream, product, c);
}

}  // namespace

void matmul(const Stream& stream, const Tensor& a, Range columns, Transpose transpose_a, const Tensor& b,
            Transpose transpose_b, const Tensor& c, float beta, const Numerics& numerics) {
  if (c.empty()) return;
  const bool ta = transpose_a == Transpose::kYes, tb = transpose_b == Transpose::kYes;
  const int64_t k = ta ? a.dim(0) : columns.size();
  if (k == 0) {
    if (beta != 0.0f) return;
    check_cuda(cudaMemsetAsync(c.raw(), 0, static_cast<size_t>(c.bytes()), cuda_handle(stream)), "cudaMemsetAsync");
    return;
  }
  if (numerics.invariant && a.dtype() == DType::kF32) {
    return multiply_f32_in_order(stream.cuda(), {a, columns, ta, b, tb, c, beta != 0.0f});
  }
  multiply(stream, {1, c.dim(0), c.dim(1), k, columns.begin}, a, ta, b, tb, c, beta != 0.0f, numerics);
}

void matmul_samples(const Stream& stream, const Tensor& a, Range columns, const Tensor& b, const Tensor& terms,
                    const Numerics& numerics) {
  const int64_t samples = terms.dim(0);
  multiply(stream, {samples, terms.dim(1), terms.dim(2), a.dim(0) / samples, columns.begin}, a, true, b, false, terms,
           false, numerics);
}

}  // namespace invar::ops::cuda
