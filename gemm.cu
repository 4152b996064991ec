// gemm.cu - gemm.cuh on cuBLASLt. The rules of its FP8 product are in the cuBLAS manual under cublasLtMatmul(): both operands contiguous
// along the contraction, sides that are multiples of 16, scales as 16-byte aligned device pointers that dequantize, no E5M2 x E5M2. Where other
// scales than one a tensor lie is in the same manual under "Outer Vector Scaling" and "128-element 1D and 128x128 2D Block Scaling" (coat.cuh,
// Operand).
//
// cuBLAS is column-major, and a row-major matrix is its transpose there: out^T = b^T a^T. Hence cuBLAS's first operand is our b.
#include "gemm.cuh"

#include <algorithm>
#include <cmath>
#include <vector>

namespace coat::gpu {
namespace {

void succeed(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) throw Error(std::string(what) + ": " + cublasLtGetStatusString(status) + ".");
}

void need(bool ok, const char* what) {
    if (!ok) throw Error(std::string("A matrix product was called wrongly: ") + what + ".");
}

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
        {PER_VECTOR, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F}, {PER_BLOCK, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F}};
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
    need(codes && scales, "an FP8 operand lacks the orientation that this product contracts");
    need(v.quant.scale == Format::F32, "scales are FP32");
    const int64_t deep = along_rows ? v.rows : v.cols, wide = along_rows ? v.cols : v.rows;
    need(deep % 16 == 0, "an FP8 operand's contracted side is not a multiple of 16");
    return {codes, scales, deep, wide, wants_contiguous, v.quant.format, scale_mode(v.quant.granularity)};
}

struct MatrixLayout {
    cublasLtMatrixLayout_t handle = nullptr;
    MatrixLayout(Format f, int64_t rows, int64_t cols) {
        succeed(cublasLtMatrixLayoutCreate(&handle, data_type(f), rows, cols, rows), "Describing a matrix to cuBLASLt failed");
    }
    ~MatrixLayout() { cublasLtMatrixLayoutDestroy(handle); }
    MatrixLayout(const MatrixLayout&) = delete;
    MatrixLayout& operator=(const MatrixLayout&) = delete;
};

struct Preference {
    cublasLtMatmulPreference_t handle = nullptr;
    Preference() { succeed(cublasLtMatmulPreferenceCreate(&handle), "Describing a preference to cuBLASLt failed"); }
    ~Preference() { cublasLtMatmulPreferenceDestroy(handle); }
    Preference(const Preference&) = delete;
    Preference& operator=(const Preference&) = delete;
    template <class T>
    void set(cublasLtMatmulPreferenceAttributes_t name, T value) {
        succeed(cublasLtMatmulPreferenceSetAttribute(handle, name, &value, sizeof value), "Setting a preference of cuBLASLt failed");
    }
};

struct Event {
    cudaEvent_t handle = nullptr;
    Event() { check(cudaEventCreate(&handle), "Creating an event failed"); }
    ~Event() { cudaEventDestroy(handle); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
};

// Order-free: every word with its place.
__global__ void hash_kernel(const uint32_t* words, int64_t n, unsigned long long* total) {
    unsigned long long sum = 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        uint64_t z = (uint64_t(i) << 32 | words[i]) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        sum += z ^ (z >> 31);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

constexpr int CANDIDATES = 16;  // asked for 64, cuBLASLt 13.1 gave 8 for every shape of a 7B, a 1.1B and a 124M model
constexpr size_t ROUNDS = 5;
// Where fewer numbers come out, two orders of summation could give the same ones by chance; nor is there time to be won.
constexpr int64_t WORTH_TIMING = 1 << 20;

}  // namespace

bool kernels_fit() {
    cudaFuncAttributes attributes;
    const bool fit = cudaFuncGetAttributes(&attributes, hash_kernel) == cudaSuccess;
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
    cublasLtMatmulDesc_t operation = nullptr;
    MatrixLayout a, b, out;
    cublasLtMatmulAlgo_t algorithm{};
    bool timed = false;

    Problem(const Call& c, bool fast_accumulation)
        : a(c.a.format, c.a.rows, c.a.cols), b(c.b.format, c.b.rows, c.b.cols), out(c.out.quant.format, c.out.cols, c.out.rows) {
        succeed(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "Describing a product to cuBLASLt failed");
        set(CUBLASLT_MATMUL_DESC_TRANSA, c.a.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, c.b.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (is_fp8(c.a.format)) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast_accumulation));
        if (c.a.scale_mode) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, c.a.scale_mode);
        if (c.b.scale_mode) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, c.b.scale_mode);
        if (!c.bias) return;
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(c.out.quant.format));
    }
    ~Problem() { cublasLtMatmulDescDestroy(operation); }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;

    template <class T>
    void set(cublasLtMatmulDescAttributes_t name, T value) {
        succeed(cublasLtMatmulDescSetAttribute(operation, name, &value, sizeof value), "Describing a product to cuBLASLt failed");
    }
    void point_to(const Call& c) {
        if (c.a.scale) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.a.scale);
        if (c.b.scale) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.b.scale);
        if (c.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    }

    // cuBLAS's own order of preference, without sums in the output's format.
    std::vector<cublasLtMatmulHeuristicResult_t> candidates(cublasLtHandle_t handle) const {
        Preference preference;
        preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(SCRATCH));
        preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            preference.set(name, uint32_t(16));
        std::vector<cublasLtMatmulHeuristicResult_t> found(CANDIDATES);
        int n = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, operation, a.handle, b.handle, out.handle, out.handle,
                                                                     preference.handle, CANDIDATES, found.data(), &n);
        succeed(n ? status : CUBLAS_STATUS_NOT_SUPPORTED, "cuBLASLt has no algorithm for a product");
        found.resize(n);
        return found;
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
    return cublasLtMatmul(handle_, p.operation, &one, c.a.data, p.a.handle, c.b.data, p.b.handle, &beta, c.out.codes, p.out.handle,
                          c.out.codes, p.out.handle, &algorithm, scratch_, SCRATCH, c.stream);
}

uint64_t Gemms::hash(const View& out, cudaStream_t s) const {  // the scratch is free when a product is done
    unsigned long long* total = static_cast<unsigned long long*>(scratch_);
    unsigned long long result = 0;
    check(cudaMemsetAsync(total, 0, sizeof *total, s), "Clearing a hash failed");
    hash_kernel<<<1024, 256, 0, s>>>(static_cast<const uint32_t*>(out.codes), out.quant.code_bytes(out.rows, out.cols) / 4, total);
    check(cudaGetLastError(), "Launching hash failed");
    check(cudaMemcpyAsync(&result, total, sizeof result, cudaMemcpyDeviceToHost, s), "Reading a hash failed");
    check(cudaStreamSynchronize(s), "Timing a matrix product failed");
    return result;
}

// Round after round of one product by every candidate, back to back: a card that runs into its power limit slows down for all of them
// alike, and the median leaves out what else happens.
void Gemms::choose(Problem& p, const Call& c) {
    p.timed = true;
    if (c.out.rows * c.out.cols < WORTH_TIMING) return;
    std::vector<cublasLtMatmulAlgo_t> equal;
    uint64_t expected = 0;
    for (const auto& candidate : p.candidates(handle_)) {
        if (candidate.state != CUBLAS_STATUS_SUCCESS || launch(p, candidate.algo, c) != CUBLAS_STATUS_SUCCESS) continue;
        const uint64_t bits = hash(c.out, c.stream);
        if (equal.empty()) expected = bits;
        if (bits == expected) equal.push_back(candidate.algo);
    }
    if (equal.size() < 2) return;
    std::vector<Event> marks(ROUNDS * equal.size() + 1);
    auto mark = [&](size_t i) { check(cudaEventRecord(marks[i].handle, c.stream), "Timing a matrix product failed"); };
    mark(0);
    for (size_t i = 0; i + 1 < marks.size(); i++) {
        succeed(launch(p, equal[i % equal.size()], c), "A matrix product failed");
        mark(i + 1);
    }
    check(cudaEventSynchronize(marks.back().handle), "Timing a matrix product failed");
    float best = INFINITY;
    for (size_t i = 0; i < equal.size(); i++) {
        float ms[ROUNDS];
        for (size_t round = 0; round < ROUNDS; round++) {
            const size_t at = round * equal.size() + i;
            check(cudaEventElapsedTime(&ms[round], marks[at].handle, marks[at + 1].handle), "Timing a matrix product failed");
        }
        std::nth_element(ms, ms + ROUNDS / 2, ms + ROUNDS);
        if (ms[ROUNDS / 2] < best) best = ms[ROUNDS / 2], p.algorithm = equal[i];
    }
}

Gemms::Problem& Gemms::problem(const Key& key, const Call& call) {
    std::unique_ptr<Problem>& found = problems_[key];
    if (!found) {
        found = std::make_unique<Problem>(call, fast_accumulation_[static_cast<int>(std::get<0>(key))]);
        found->point_to(call);
        found->algorithm = found->candidates(handle_).front().algo;
    }
    found->point_to(call);
    if (tuning_ && !found->timed && !call.accumulate) choose(*found, call);
    return *found;
}

void Gemms::run(Gemm kind, const Operand& a, const Operand& b, const View& out, bool accumulate, const void* bias, cudaStream_t s) {
    need(!out.quant.fp8(), "its result is F32 or BF16");
    need(a.view.quant.fp8() == b.view.quant.fp8(), "both operands are FP8 or none is");
    need(!(a.view.quant.format == Format::E5M2 && b.view.quant.format == Format::E5M2), "no GPU multiplies E5M2 by E5M2");
    if (out.rows == 0) return;
    const Call call{side(b, kind != Gemm::Fprop, true), side(a, kind == Gemm::Wgrad, false), out, accumulate, bias, s};
    const int64_t depth_a = call.a.transpose ? call.a.rows : call.a.cols, width = call.a.transpose ? call.a.cols : call.a.rows;
    const int64_t depth_b = call.b.transpose ? call.b.cols : call.b.rows, height = call.b.transpose ? call.b.rows : call.b.cols;
    need(depth_a == depth_b && width == out.cols && height == out.rows, "the shapes of its matrices do not fit");
    const Key key{kind, call.a.format, call.b.format, out.quant.format, call.a.scale_mode, call.b.scale_mode,
                  out.rows, out.cols, depth_a, bias != nullptr};
    const Problem& p = problem(key, call);
    succeed(launch(p, p.algorithm, call), "A matrix product failed");
}

}  // namespace coat::gpu
