// gemm.cu - gemm.cuh on cuBLASLt.
//
// The cuBLAS manual has the rules of FP8 GEMMs under cublasLtMatmul(): both operands contiguous along the
// reduction, dimensions that are multiples of 16, scales as 16-byte aligned device pointers, no E5M2 x E5M2.
// tensor.cuh (Operand) has the layouts of scales. cuBLAS is column-major, and there a row-major matrix is its
// transpose: out^T = b^T a^T. So cuBLAS's operand A is our b.
#include "gemm.cuh"

#include <algorithm>
#include <vector>

#include "cuda.cuh"

namespace coat::gpu {
namespace {

// A function of cuBLASLt. The library has half a gigabyte, for which every start of the program would wait
// 0.1 seconds: it is loaded with the first GEMM.
#define LOADED(function)                                                                         \
    [] {                                                                                         \
        static const auto loaded = library_function<decltype(function)>(                         \
            concat("libcublasLt.so.", CUBLAS_VER_MAJOR), #function, "install the CUDA toolkit"); \
        return loaded;                                                                           \
    }()

void succeed(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(std::string(what) + ": " + LOADED(cublasLtGetStatusString)(status) + ".");
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
    const bool per_tensor = v.quant.granularity == PER_TENSOR;
    const void* scales = over_rows && !per_tensor ? x.transposed_scales : v.scales;
    const int64_t depth = over_rows ? v.rows : v.cols, width = over_rows ? v.cols : v.rows;
    require(codes && scales, "an FP8 operand lacks the codes of the orientation that this GEMM reads");
    return {codes, scales, depth, width, contiguous, v.quant.format, scale_mode(v.quant.granularity)};
}

void described(cublasStatus_t status) { succeed(status, "Describing a GEMM to cuBLASLt failed"); }
cublasLtMatrixLayoutOpaque_t layout(Format f, int64_t rows, int64_t cols) {
    const auto init = LOADED(cublasLtMatrixLayoutInit_internal);
    cublasLtMatrixLayoutOpaque_t layout;
    described(init(&layout, sizeof layout, data_type(f), rows, cols, rows));
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
    const auto get = LOADED(cublasLtMatmulAlgoConfigGetAttribute);
    get(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, nullptr);
    return static_cast<size_t>(std::find(std::begin(FAST_TILES), std::end(FAST_TILES), tile) - FAST_TILES);
}

// What cuBLASLt must know of out = a b, or out += a b. Accumulation is in FP32 (if fast, in fewer bits); the
// epilogue adds the bias.
struct Problem {
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulDescOpaque_t operation;

    // x, y: cuBLAS's A and B. Scales and bias are read from device memory when the GEMM runs.
    Problem(const Side& x, const Side& y, const View& to, const void* bias, bool fast)
        : a(layout(x.format, x.rows, x.cols)), b(layout(y.format, y.rows, y.cols)),
          out(layout(to.quant.format, to.cols, to.rows)) {
        const auto init = LOADED(cublasLtMatmulDescInit_internal);
        described(init(&operation, sizeof operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        set(CUBLASLT_MATMUL_DESC_TRANSA, x.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, y.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (is_fp8(x.format)) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(fast));
        if (x.scale_mode) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, x.scale_mode);
        if (y.scale_mode) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, y.scale_mode);
        if (x.scale) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, x.scale);
        if (y.scale) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, y.scale);
        if (!bias) return;
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(to.quant.format));
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    template <class T> void set(cublasLtMatmulDescAttributes_t name, T value) {
        described(LOADED(cublasLtMatmulDescSetAttribute)(&operation, name, &value, sizeof value));
    }

    // cuBLASLt's algorithms, by their tiles or in its own order. Partial sums in the output's format are
    // excluded; by tile all are, so that the order of additions does not depend on the choice.
    std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, bool by_tile) {
        cublasLtMatmulPreferenceOpaque_t preference;
        described(LOADED(cublasLtMatmulPreferenceInit_internal)(&preference, sizeof preference));
        auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
            described(LOADED(cublasLtMatmulPreferenceSetAttribute)(&preference, name, &value, sizeof value));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(Gemms::SCRATCH));
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               uint32_t(by_tile ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        for (auto name :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            prefer(name, uint32_t(16));
        cublasLtMatmulHeuristicResult_t found[CANDIDATES];
        int n = 0;
        const auto find = LOADED(cublasLtMatmulAlgoGetHeuristic);
        find(handle, &operation, &a, &b, &out, &out, &preference, CANDIDATES, found, &n);
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        for (int i = 0; i < n; i++)
            if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
        if (by_tile)
            std::stable_sort(algorithms.begin(), algorithms.end(), [](const auto& x, const auto& y) {
                return place_of_tile(x) < place_of_tile(y);
            });
        return algorithms;
    }
};

}  // namespace

Gemms::~Gemms() {
    if (handle_) LOADED(cublasLtDestroy)(handle_);
}

void Gemms::run(Gemm kind, const Operand& a, const Operand& b, const View& out, bool accumulate,
                const void* bias, cudaStream_t s) {
    if (s == DRY_RUN) return;
    if (!handle_) succeed(LOADED(cublasLtCreate)(&handle_), "Starting cuBLASLt failed");
    const Side x = side(b, kind != Gemm::Fprop, true), y = side(a, kind == Gemm::Wgrad, false);
    const int64_t depth = x.transpose ? x.rows : x.cols, width = x.transpose ? x.cols : x.rows;
    const int64_t depth_y = y.transpose ? y.cols : y.rows, height = y.transpose ? y.rows : y.cols;
    require(depth == depth_y && width == out.cols && height == out.rows, "the shapes of a GEMM do not fit");
    const bool fast = fast_accumulation_[static_cast<int>(kind)];
    Problem p(x, y, out, bias, fast);
    // A candidate may fail, a chosen algorithm may not.
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    auto launch = [&](const cublasLtMatmulAlgo_t& algorithm) {
        const float one = 1, beta = accumulate ? 1 : 0;
        status = LOADED(cublasLtMatmul)(handle_, &p.operation, &one, x.data, &p.a, y.data, &p.b, &beta,
                                        out.data, &p.out, out.data, &p.out, &algorithm, scratch, SCRATCH, s);
        if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // else the next launch would report it
        return status == CUBLAS_STATUS_SUCCESS;
    };
    const Key key{kind,     x.format, y.format, out.quant.format, x.scale_mode, y.scale_mode,
                  out.rows, out.cols, depth,    bias != nullptr};
    if (const auto chosen = algorithms_.find(key); chosen != algorithms_.end()) {
        launch(chosen->second);
    } else {  // the first GEMM of a shape: by the first algorithm that can be launched
        const bool by_tile = (fast || x.format == Format::BF16) && kind != Gemm::Wgrad &&
                             out.rows * out.cols >= LARGE &&
                             device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
        const std::vector<cublasLtMatmulAlgo_t> all = p.candidates(handle_, by_tile);
        const auto first = std::find_if(all.begin(), all.end(), launch);
        if (first != all.end()) algorithms_[key] = *first;
    }
    succeed(status, "A GEMM failed");
}

}  // namespace coat::gpu
