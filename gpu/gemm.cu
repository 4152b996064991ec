// gemm.cu - gemm.cuh on cuBLASLt. The rules of its FP8 product are in the cuBLAS manual under cublasLtMatmul(): both operands contiguous
// along the contraction, sides that are multiples of 16, scales as 16-byte aligned device pointers that dequantize, no E5M2 x E5M2. Where other
// scales than one a tensor lie is in the same manual under "Outer Vector Scaling" and "128-element 1D and 128x128 2D Block Scaling" (coat.cuh,
// Operand).
//
// cuBLAS is column-major, and a row-major matrix is its transpose there: out^T = b^T a^T. Hence cuBLAS's first operand is our b.
#include "gemm.cuh"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace coat::gpu {
namespace {

void succeed(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) throw Error(std::string(what) + ": " + cublasLtGetStatusString(status) + ".");
}

void succeed(cudaError_t error, const char* what) { check(error, what); }

cudaDataType data_type(Format f) {
    constexpr cudaDataType types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[static_cast<int>(f)];
}

// A matrix as cuBLAS sees it: column-major, contiguous along rows.
struct Side {
    const void* data;
    const void* scale;
    int64_t rows, cols;
    bool transpose;
    Format format;
    int32_t scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
};

int32_t scale_mode(const Granularity& g) {
    constexpr struct { Granularity granularity; cublasLtMatmulMatrixScale_t mode; } modes[] = {
        {PER_TENSOR, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F}, {PER_ROW, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F},
        {PER_1x128, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F}, {PER_128x128, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F}};
    for (const auto& row : modes)
        if (row.granularity == g) return row.mode;
    throw Error("A matrix product was called wrongly: no product scales by such blocks.");
}

// An operand by the direction that the product contracts: along its columns (`along_rows` = false) or along its rows, as it lies or transposed.
// wants_contiguous: the transposition under which cuBLAS contracts contiguous numbers.
Side side(const Operand& x, bool along_rows, bool wants_contiguous) {
    const View& v = x.view;
    if (!v.quant.fp8()) return {v.codes, nullptr, v.cols, v.rows, along_rows ? !wants_contiguous : wants_contiguous, v.quant.format};
    const bool whole = v.quant.granularity == PER_TENSOR;
    const void* codes = along_rows ? x.transposed : v.codes;
    const void* scales = along_rows && !whole ? x.transposed_scales : v.scales;
    require(codes && scales, "an FP8 operand lacks the orientation that this product contracts");
    require(v.quant.scale == Format::F32, "scales are FP32");
    const int64_t deep = along_rows ? v.rows : v.cols, wide = along_rows ? v.cols : v.rows;
    require(deep % 16 == 0, "an FP8 operand's contracted side is not a multiple of 16");
    return {codes, scales, deep, wide, wants_contiguous, v.quant.format, scale_mode(v.quant.granularity)};
}

// A handle of cuBLASLt or CUDA that is destroyed with its owner, also where building the owner fails.
template <auto DESTROY>
struct Destroy {
    template <class T>
    void operator()(T* handle) const { DESTROY(handle); }
};
template <class Handle, auto DESTROY>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<DESTROY>>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;

template <class T, class Create, class... Args>
T make(const char* what, Create create, Args... args) {
    typename T::pointer handle = nullptr;
    succeed(create(&handle, args...), what);
    return T(handle);
}
MatrixLayout layout(Format f, int64_t rows, int64_t cols) {
    return make<MatrixLayout>("Describing a matrix to cuBLASLt failed", cublasLtMatrixLayoutCreate, data_type(f), rows,
                              cols, rows);
}

// What tells one algorithm's output from another's: a sum over all words, each mixed with its index, so that the order
// of the additions does not matter; and how many words are zero.
struct Fingerprint {
    unsigned long long bits, zeros;
};
__global__ void fingerprint_kernel(const uint32_t* words, int64_t n, Fingerprint* total) {
    unsigned long long sum = 0;
    unsigned zeros = 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        uint64_t z = (uint64_t(i) << 32 | words[i]) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        sum += z ^ (z >> 31);
        zeros += words[i] == 0;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    zeros = __reduce_add_sync(0xFFFFFFFFu, zeros);
    if (threadIdx.x % 32 == 0) atomicAdd(&total->bits, sum), atomicAdd(&total->zeros, zeros);
}

constexpr int CANDIDATES = 16;  // asked for 64, cuBLASLt 13.1 gave 8 for every shape of a 7B, a 1.1B and a 124M model
constexpr size_t ROUNDS = 5;
// With fewer outputs, two orders of summation could give the same bits by chance; and little time is to be won.
constexpr int64_t WORTH_TIMING = 1 << 20;
constexpr int64_t FEW_ZEROS = 16;  // with more than one zero in so many words of an output, a comparison says nothing

}  // namespace

bool kernels_fit() {
    cudaFuncAttributes attributes;
    const bool fit = cudaFuncGetAttributes(&attributes, fingerprint_kernel) == cudaSuccess;
    cudaGetLastError();  // forget it
    return fit;
}

struct Gemms::Call {
    Side a, b;  // cuBLAS's A and B: our b and a
    View out;
    bool accumulate;
    const void* bias;
    cudaStream_t stream;
};

struct Gemms::Problem {
    MatrixLayout a, b, out;
    Operation operation =
        make<Operation>("Describing a GEMM to cuBLASLt failed", cublasLtMatmulDescCreate, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulAlgo_t algorithm{};
    bool tuned = false;

    Problem(const Call& c, bool fast_accumulation)
        : a(layout(c.a.format, c.a.rows, c.a.cols)), b(layout(c.b.format, c.b.rows, c.b.cols)),
          out(layout(c.out.quant.format, c.out.cols, c.out.rows)) {
        set(CUBLASLT_MATMUL_DESC_TRANSA, c.a.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, c.b.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (is_fp8(c.a.format)) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast_accumulation));
        if (c.a.scale_mode) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, c.a.scale_mode);
        if (c.b.scale_mode) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, c.b.scale_mode);
        if (c.bias) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
            set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(c.out.quant.format));
        }
        point_to(c);
    }

    template <class T>
    void set(cublasLtMatmulDescAttributes_t name, T value) {
        succeed(cublasLtMatmulDescSetAttribute(operation.get(), name, &value, sizeof value),
                "Describing a GEMM to cuBLASLt failed");
    }
    void point_to(const Call& c) {
        if (c.a.scale) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.a.scale);
        if (c.b.scale) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.b.scale);
        if (c.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    }

    // In cuBLAS's own order of preference, without sums in the output's format. None: an Error.
    std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle) const {
        const auto preference =
            make<Preference>("Describing a preference to cuBLASLt failed", cublasLtMatmulPreferenceCreate);
        auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
            succeed(cublasLtMatmulPreferenceSetAttribute(preference.get(), name, &value, sizeof value),
                    "Setting a preference of cuBLASLt failed");
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(SCRATCH));
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            prefer(name, uint32_t(16));
        cublasLtMatmulHeuristicResult_t found[CANDIDATES];
        int n = 0;
        const cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, operation.get(), a.get(), b.get(), out.get(), out.get(),
                                           preference.get(), CANDIDATES, found, &n);
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        for (int i = 0; i < n; i++)
            if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
        succeed(algorithms.empty() ? CUBLAS_STATUS_NOT_SUPPORTED : status, "cuBLASLt has no algorithm for a GEMM");
        return algorithms;
    }
};

Gemms::Gemms(void* scratch, const bool (&fast_accumulation)[3]) : scratch_(scratch) {
    std::copy(fast_accumulation, fast_accumulation + 3, fast_accumulation_);
    succeed(cublasLtCreate(&handle_), "Starting cuBLASLt failed");
}
Gemms::~Gemms() {
    problems_.clear();
    cublasLtDestroy(handle_);
}

cublasStatus_t Gemms::launch(const Problem& p, const cublasLtMatmulAlgo_t& algorithm, const Call& c) const {
    const float one = 1, beta = c.accumulate ? 1 : 0;
    const cublasStatus_t status =
        cublasLtMatmul(handle_, p.operation.get(), &one, c.a.data, p.a.get(), c.b.data, p.b.get(), &beta, c.out.codes,
                       p.out.get(), c.out.codes, p.out.get(), &algorithm, scratch_, SCRATCH, c.stream);
    if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // else the next kernel's launch would be blamed for it
    return status;
}

// Builds the entry of a shape and launches its first GEMM, by the first algorithm that can do it. Nothing is kept where
// one of these fails.
Gemms::Problem& Gemms::launch_first(const Key& key, const Call& c) {
    auto fresh = std::make_unique<Problem>(c, fast_accumulation_[static_cast<int>(std::get<0>(key))]);
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    for (const cublasLtMatmulAlgo_t& candidate : fresh->candidates(handle_)) {
        fresh->algorithm = candidate;
        status = launch(*fresh, candidate, c);
        if (status == CUBLAS_STATUS_SUCCESS) break;
    }
    succeed(status, "A GEMM failed");
    return *problems_.emplace(key, std::move(fresh)).first->second;
}

// Launches the GEMM in rounds of all candidates, back to back: where the GPU's power limit slows it down, it does so for
// all of them alike, and the median leaves out what else happens.
void Gemms::choose_fastest(Problem& p, const Call& c) {
    const int64_t words = c.out.quant.code_bytes(c.out.rows, c.out.cols) / 4;
    auto fingerprint = [&] {  // the scratch is free when a GEMM is done
        Fingerprint result{}, *total = static_cast<Fingerprint*>(scratch_);
        check(cudaMemsetAsync(total, 0, sizeof *total, c.stream), "Clearing a fingerprint failed");
        fingerprint_kernel<<<1024, 256, 0, c.stream>>>(static_cast<const uint32_t*>(c.out.codes), words, total);
        check(cudaGetLastError(), "Launching fingerprint failed");
        check(cudaMemcpyAsync(&result, total, sizeof result, cudaMemcpyDeviceToHost, c.stream),
              "Reading a fingerprint failed");
        check(cudaStreamSynchronize(c.stream), "Timing a GEMM failed");
        return result;
    };
    const Fingerprint expected = fingerprint();  // of what run() has just launched
    if (static_cast<int64_t>(expected.zeros) > words / FEW_ZEROS) return;
    std::vector<cublasLtMatmulAlgo_t> equal;
    for (const cublasLtMatmulAlgo_t& candidate : p.candidates(handle_))
        if (launch(p, candidate, c) == CUBLAS_STATUS_SUCCESS && fingerprint().bits == expected.bits) equal.push_back(candidate);

    std::vector<Event> marks(ROUNDS * equal.size() + 1);
    for (Event& mark : marks)
        mark = make<Event>("Creating an event failed", cudaEventCreateWithFlags, unsigned(cudaEventDefault));
    auto mark = [&](size_t i) { check(cudaEventRecord(marks[i].get(), c.stream), "Timing a GEMM failed"); };
    mark(0);
    for (size_t i = 0; i + 1 < marks.size(); i++) {
        succeed(launch(p, equal[i % equal.size()], c), "A GEMM failed");
        mark(i + 1);
    }
    check(cudaEventSynchronize(marks.back().get()), "Timing a GEMM failed");
    float best = INFINITY;
    for (size_t i = 0; i < equal.size(); i++) {
        float ms[ROUNDS];
        for (size_t round = 0; round < ROUNDS; round++) {
            const size_t at = round * equal.size() + i;
            check(cudaEventElapsedTime(&ms[round], marks[at].get(), marks[at + 1].get()), "Timing a GEMM failed");
        }
        std::nth_element(ms, ms + ROUNDS / 2, ms + ROUNDS);
        if (ms[ROUNDS / 2] < best) best = ms[ROUNDS / 2], p.algorithm = equal[i];
    }
    p.tuned = true;
}

int64_t Gemms::tuned() const {
    return std::count_if(problems_.begin(), problems_.end(), [](const auto& entry) { return entry.second->tuned; });
}

void Gemms::run(Gemm kind, const Operand& a, const Operand& b, const View& out, bool accumulate, const void* bias, cudaStream_t s) {
    require(!out.quant.fp8(), "its result is F32 or BF16");
    require(a.view.quant.fp8() == b.view.quant.fp8(), "both operands are FP8 or none is");
    require(!(a.view.quant.format == Format::E5M2 && b.view.quant.format == Format::E5M2), "no GPU multiplies E5M2 by E5M2");
    if (out.rows == 0) return;
    const Call call{side(b, kind != Gemm::Fprop, true), side(a, kind == Gemm::Wgrad, false), out, accumulate, bias, s};
    const int64_t depth_a = call.a.transpose ? call.a.rows : call.a.cols, width = call.a.transpose ? call.a.cols : call.a.rows;
    const int64_t depth_b = call.b.transpose ? call.b.cols : call.b.rows, height = call.b.transpose ? call.b.rows : call.b.cols;
    require(depth_a == depth_b && width == out.cols && height == out.rows, "the shapes of its matrices do not fit");
    const Key key{kind, call.a.format, call.b.format, out.quant.format, call.a.scale_mode, call.b.scale_mode,
                  out.rows, out.cols, depth_a, bias != nullptr};
    const auto found = problems_.find(key);
    if (found != problems_.end()) {
        found->second->point_to(call);
        succeed(launch(*found->second, found->second->algorithm, call), "A GEMM failed");
    }
    Problem& p = found != problems_.end() ? *found->second : launch_first(key, call);
    // The clock comes after the GEMM: what it leaves in `out` is the same.
    if (tuning_ && !p.tuned && !accumulate && out.rows * out.cols >= WORTH_TIMING) choose_fastest(p, call);
}

}  // namespace coat::gpu
