// gemm.cu - gemm.cuh on cuBLASLt.
//
// The cuBLAS manual has the rules of FP8 GEMMs under cublasLtMatmul(): both operands contiguous along the
// reduction, dimensions that are multiples of 16, scales as 16-byte aligned device pointers, no E5M2 x E5M2.
// The layouts of scales other than per-tensor are under "Outer Vector Scaling" and "128-element 1D and
// 128x128 2D Block Scaling"; tensor.cuh (Operand) repeats them. cuBLAS is column-major, and there a row-major
// matrix is its transpose: out^T = b^T a^T. So cuBLAS's operand A is our b.
#include "gemm.cuh"

#include <algorithm>
#include <vector>

#include "cuda.cuh"

namespace coat::gpu {
namespace {

void succeed(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(std::string(what) + ": " + cublasLtGetStatusString(status) + ".");
}

cudaDataType data_type(Format f) {
    constexpr cudaDataType types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[static_cast<int>(f)];
}

// An operand as cuBLAS sees it: column-major, so `rows` is the contiguous dimension.
struct Side {
    const void* data;
    const void* scale;
    int64_t rows, cols;
    bool transpose;
    Format format;
    int32_t scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
};

int32_t scale_mode(const Granularity& g) {
    if (g == PER_TENSOR) return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    if (g == PER_ROW) return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    if (g == PER_1x128) return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    if (g == PER_128x128) return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    throw Error("A GEMM was called wrongly: cuBLASLt has no scales for such blocks.");
}

// The operand x of a GEMM that reduces over x's rows (over_rows) or over its columns. contiguous: the value
// of `transpose` with which cuBLAS reduces over the contiguous dimension; true for its A, false for its B.
Side side(const Operand& x, bool over_rows, bool contiguous) {
    const View& v = x.view;
    const bool transpose = over_rows != contiguous;
    if (!v.quant.fp8()) return {v.data, nullptr, v.cols, v.rows, transpose, v.quant.format};
    const void* codes = over_rows ? x.transposed : v.data;
    require(codes, "an FP8 operand lacks the orientation that this GEMM reads");
    const bool per_tensor = v.quant.granularity == PER_TENSOR;
    const void* scales = over_rows && !per_tensor ? x.transposed_scales : v.scales;
    const int64_t depth = over_rows ? v.rows : v.cols, width = over_rows ? v.cols : v.rows;
    require(scales, "an FP8 operand lacks the scales of the orientation that this GEMM reads");
    return {codes, scales, depth, width, contiguous, v.quant.format, scale_mode(v.quant.granularity)};
}

constexpr char DESCRIBING[] = "Describing a GEMM to cuBLASLt failed";
cublasLtMatrixLayoutOpaque_t layout(Format f, int64_t rows, int64_t cols) {
    cublasLtMatrixLayoutOpaque_t layout;
    succeed(cublasLtMatrixLayoutInit(&layout, data_type(f), rows, cols, rows), DESCRIBING);
    return layout;
}

constexpr int CANDIDATES = 16;  // cuBLASLt 13.1 has 8 for every shape of a 7B, a 1.1B and a 124M model

// Tiles small enough for one warpgroup, so that two work in turn: one stores its sums while the other
// multiplies. On an H100 the first of these takes 4 to 18% less time than cuBLASLt's first choice for large
// outputs of fprop and BF16 dgrad (in 3 of 19 shapes the same); not for wgrad and FP8 sums moved to FP32.
constexpr uint32_t FAST_TILES[] = {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x160,
                                   CUBLASLT_MATMUL_TILE_176x128};
constexpr int64_t LARGE = 1 << 23;  // elements: at least 2.8 tiles for each multiprocessor
size_t place_of_tile(const cublasLtMatmulAlgo_t& algorithm) {
    uint32_t tile = 0;
    cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile,
                                         nullptr);
    return static_cast<size_t>(std::find(std::begin(FAST_TILES), std::end(FAST_TILES), tile) - FAST_TILES);
}

}  // namespace

struct Gemms::Call {
    Side a, b;  // cuBLAS's A and B: our b and a
    View out;
    bool accumulate;
    const void* bias;
    cudaStream_t stream;
};

struct Gemms::Problem {  // what cuBLASLt knows of a shape
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatmulAlgo_t algorithm{};

    // Accumulation is in FP32 (if fast, in fewer bits), alpha is 1, beta 0 or 1; the epilogue adds the bias.
    Problem(const Call& c, bool fast_accumulation)
        : a(layout(c.a.format, c.a.rows, c.a.cols)), b(layout(c.b.format, c.b.rows, c.b.cols)),
          out(layout(c.out.quant.format, c.out.cols, c.out.rows)) {
        succeed(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), DESCRIBING);
        set(CUBLASLT_MATMUL_DESC_TRANSA, c.a.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, c.b.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (is_fp8(c.a.format)) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast_accumulation));
        if (c.a.scale_mode) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, c.a.scale_mode);
        if (c.b.scale_mode) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, c.b.scale_mode);
        if (c.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        if (c.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(c.out.quant.format));
        set_pointers(c);
    }

    template <class T> void set(cublasLtMatmulDescAttributes_t name, T value) {
        succeed(cublasLtMatmulDescSetAttribute(&operation, name, &value, sizeof value), DESCRIBING);
    }
    // Scales and bias are read from device memory when the GEMM runs, so the host needs not know them.
    void set_pointers(const Call& c) {
        if (c.a.scale) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.a.scale);
        if (c.b.scale) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.b.scale);
        if (c.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
    }

    // cuBLASLt's algorithms, at least one, by their tiles or in its own order. Partial sums in the output's
    // format are excluded; by tile all are, so that the order of additions does not depend on the choice.
    std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, bool by_tile) {
        cublasLtMatmulPreferenceOpaque_t preference;
        succeed(cublasLtMatmulPreferenceInit(&preference), DESCRIBING);
        auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
            succeed(cublasLtMatmulPreferenceSetAttribute(&preference, name, &value, sizeof value),
                    DESCRIBING);
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(SCRATCH));
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               uint32_t(by_tile ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        for (auto name :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            prefer(name, uint32_t(16));
        cublasLtMatmulHeuristicResult_t found[CANDIDATES];
        int n = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &operation, &a, &b, &out, &out,
                                                                     &preference, CANDIDATES, found, &n);
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        for (int i = 0; i < n; i++)
            if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
        succeed(algorithms.empty() ? CUBLAS_STATUS_NOT_SUPPORTED : status,
                "cuBLASLt does not support a GEMM");
        if (by_tile)
            std::stable_sort(algorithms.begin(), algorithms.end(), [](const auto& x, const auto& y) {
                return place_of_tile(x) < place_of_tile(y);
            });
        return algorithms;
    }
};

Gemms::Gemms(void* scratch, const bool (&fast_accumulation)[3]) : scratch_(scratch) {
    std::copy(fast_accumulation, fast_accumulation + 3, fast_accumulation_);
}
Gemms::~Gemms() {
    if (handle_) cublasLtDestroy(handle_);
}

// out = a b + beta out. The status is for the caller to judge: a candidate may fail, a chosen one may not.
cublasStatus_t Gemms::launch(Problem& p, const cublasLtMatmulAlgo_t& algorithm, const Call& c) const {
    const float one = 1, beta = c.accumulate ? 1 : 0;
    const cublasStatus_t status =
        cublasLtMatmul(handle_, &p.operation, &one, c.a.data, &p.a, c.b.data, &p.b, &beta, c.out.data, &p.out,
                       c.out.data, &p.out, &algorithm, scratch_, SCRATCH, c.stream);
    if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // else the next launch would report it
    return status;
}

void Gemms::run(Gemm kind, const Operand& a, const Operand& b, const View& out, bool accumulate,
                const void* bias, cudaStream_t s) {
    if (out.rows == 0 || s == DRY_RUN) return;
    if (!handle_) succeed(cublasLtCreate(&handle_), "Starting cuBLASLt failed");
    const Side ca = side(b, kind != Gemm::Fprop, true), cb = side(a, kind == Gemm::Wgrad, false);
    const Call call{ca, cb, out, accumulate, bias, s};
    const int64_t depth = ca.transpose ? ca.rows : ca.cols, width = ca.transpose ? ca.cols : ca.rows;
    const int64_t depth_b = cb.transpose ? cb.cols : cb.rows, height = cb.transpose ? cb.rows : cb.cols;
    require(depth == depth_b && width == out.cols && height == out.rows, "the shapes of a GEMM do not fit");
    std::unique_ptr<Problem>& p = problems_[{kind, ca.format, cb.format, out.quant.format, ca.scale_mode,
                                             cb.scale_mode, out.rows, out.cols, depth, bias != nullptr}];
    if (p) {
        p->set_pointers(call);
        succeed(launch(*p, p->algorithm, call), "A GEMM failed");
    } else {  // the first GEMM of a shape: by the first algorithm that can be launched
        const bool fast = fast_accumulation_[static_cast<int>(kind)],
                   by_tile = (fast || ca.format == Format::BF16) && kind != Gemm::Wgrad &&
                             out.rows * out.cols >= LARGE &&
                             device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
        auto first = std::make_unique<Problem>(call, fast);
        cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
        for (const cublasLtMatmulAlgo_t& candidate : first->candidates(handle_, by_tile)) {
            status = launch(*first, first->algorithm = candidate, call);
            if (status == CUBLAS_STATUS_SUCCESS) break;
        }
        succeed(status, "A GEMM failed");
        p = std::move(first);
    }
}

}  // namespace coat::gpu
