// gpu/gemm.cpp - CublasGemms::run() (gpu/gemm.h): operands as cuBLAS sees them, the description of a GEMM,
// the choice of an algorithm, and the launch.
//
// The cuBLAS manual has the rules of FP8 GEMMs under cublasLtMatmul(): the dimension that is summed over is
// contiguous in both operands (common/formats.h); dimensions are multiples of 16; scales are 16-byte aligned
// and on the device; the operands are not both in E5M2. An Operand has its scales in the layouts that cuBLAS
// wants.
//
// cuBLAS is column-major: it takes a row-major matrix of this program for the transpose of that matrix. So it
// is asked for the transpose of `out`, a product A B whose factors have changed places: A is made of our
// right operand, and B of our left one. For example fprop, y = x w^T:
//
//   in memory, row-major    what cuBLAS sees    what it is in y^T = w x^T
//   y (N, out)              y^T (out, N)        the result
//   w (out, in)             w^T (in, out)       A, which cuBLAS is to transpose
//   x (N, in)               x^T (in, N)         B, as it is
#include "gemm.h"

#include <algorithm>
#include <vector>

namespace coat::gpu {
namespace {

void check_cublas(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS) throw Error(what, ": ", cublasLtGetStatusString(status), ".");
}
void check_description(cublasStatus_t status) {
    check_cublas(status, "Describing a GEMM to cuBLASLt failed");
}

// -----------------------------------------------------------------------------------------------------------
// Operands as cuBLAS sees them

cudaDataType data_type(Format f) {
    switch (f) {
        case Format::FP32: return CUDA_R_32F;
        case Format::BF16: return CUDA_R_16BF;
        case Format::E4M3: return CUDA_R_8F_E4M3;
        case Format::E5M2: return CUDA_R_8F_E5M2;
    }
    return {};
}

constexpr int32_t ONE_SCALE = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;  // for the whole tensor
int32_t scale_mode(const Granularity& g) {
    if (g == PER_TENSOR) return ONE_SCALE;
    if (g == PER_ROW) return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    if (g == PER_1x128) return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    require(g == PER_128x128, "cuBLASLt has no scales for such blocks");
    return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// An operand as cuBLAS sees it: a column-major matrix, in which the `rows` elements of a column are
// contiguous. The GEMM multiplies by the matrix or, if `transpose`, by its transpose.
struct CublasMatrix {
    const void* data;
    const void* scales;  // null if it is not FP8
    int64_t rows, cols;
    bool transpose;
    Format format;
    int32_t scale_mode;

    // The shape of the matrix or, if `transpose`, of its transpose.
    int64_t factor_rows() const { return transpose ? cols : rows; }
    int64_t factor_cols() const { return transpose ? rows : cols; }
};

// The scales of the codes that a GEMM reads. (Null in BF16 and FP32.)
const float* scales_of(const Operand& operand, bool reads_transposed_codes) {
    const TensorRef& tensor = operand.tensor;
    if (!tensor.format.is_fp8()) return nullptr;
    if (tensor.format.granularity == PER_TENSOR)
        return tensor.tensor_scale ? &tensor.tensor_scale->scale : nullptr;
    return reads_transposed_codes ? operand.transposed_block_scales : operand.block_scales;
}

// Describes an operand to cuBLAS: as its A if is_a, else as its B. In FP8, if the GEMM sums along the columns
// of the operand, the transposed codes are described. In all other cases it is the row-major elements.
//
// For cuBLAS, elements that are contiguous are a column. It sums along the rows of A, and along the columns
// of B. So where the sum goes along contiguous elements, A is to be transposed (T), and B is not (N):
//
//   is the sum along contiguous elements?              A   B
//   yes: in FP8; in BF16 and FP32 along rows           T   N
//   no: in BF16 and FP32 along columns                 N   T
CublasMatrix matrix_of(const Operand& operand, bool is_a, SumAlong along) {
    const TensorRef& tensor = operand.tensor;
    const bool fp8 = tensor.format.is_fp8();
    const bool reads_transposed_codes = fp8 && along == SumAlong::Column;
    const bool sum_is_contiguous = fp8 || along == SumAlong::Row;
    const CublasMatrix matrix{.data = reads_transposed_codes ? operand.transposed : tensor.data,
                              .scales = scales_of(operand, reads_transposed_codes),
                              .rows = reads_transposed_codes ? tensor.rows : tensor.cols,
                              .cols = reads_transposed_codes ? tensor.cols : tensor.rows,
                              .transpose = is_a ? sum_is_contiguous : !sum_is_contiguous,
                              .format = tensor.format.element_format,
                              .scale_mode = scale_mode(tensor.format.granularity)};
    require(!fp8 || (matrix.data && matrix.scales),
            "an FP8 operand lacks the codes, row-major or transposed, that this GEMM reads, or their scales");
    return matrix;
}

// -----------------------------------------------------------------------------------------------------------
// The description of a GEMM

// A column-major matrix. The last `rows` is the distance from a column to the next one.
cublasLtMatrixLayoutOpaque_t matrix_layout(Format f, int64_t rows, int64_t cols) {
    cublasLtMatrixLayoutOpaque_t layout;
    check_description(cublasLtMatrixLayoutInit(&layout, data_type(f), rows, cols, rows));
    return layout;
}

// The description of out^T = A B for cuBLASLt. Sums are in FP32, or in fewer bits if `fast`
// (common/recipes.h, FastAccumulation). The bias, if there is one, is added to the sums before they are
// stored.
struct Description {
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, out_layout;
    cublasLtMatmulDescOpaque_t operation;

    // Scales and bias are given as addresses: the GEMM reads them when it runs.
    Description(const CublasMatrix& a, const CublasMatrix& b, const TensorRef& out, const void* bias,
                bool fast)
        : a_layout(matrix_layout(a.format, a.rows, a.cols)),
          b_layout(matrix_layout(b.format, b.rows, b.cols)),
          out_layout(matrix_layout(out.format.element_format, out.cols, out.rows)) {
        check_description(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        set(CUBLASLT_MATMUL_DESC_TRANSA, a.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, b.transpose ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (is_fp8(a.format)) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(fast));
        // If no mode is set, cuBLASLt assumes one FP32 scale for the tensor.
        if (a.scale_mode != ONE_SCALE) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a.scale_mode);
        if (b.scale_mode != ONE_SCALE) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b.scale_mode);
        if (a.scales) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a.scales);
        if (b.scales) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b.scales);
        if (!bias) return;
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(out.format.element_format));
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    template <class Value> void set(cublasLtMatmulDescAttributes_t name, Value value) {
        check_description(cublasLtMatmulDescSetAttribute(&operation, name, &value, sizeof value));
    }
};

// -----------------------------------------------------------------------------------------------------------
// The choice of an algorithm. This section can wait: the launch calls candidate_algorithms() and
// should_prefer_tiles().

// How many algorithms cuBLASLt is asked for. Version 13.1 knows 8 for every shape of a 7B, a 1.1B and a 124M
// model.
constexpr int CANDIDATES = 16;

// Tiles of `out` that are small enough for one warpgroup, so that two warpgroups work in turn: one stores its
// sums while the other multiplies. On an H100 the first of these tiles takes up to 18% less time than
// cuBLASLt's first choice for large outputs of fprop and BF16 dgrad. For wgrad, and for FP8 without fast
// accumulation, it takes no less.
constexpr uint32_t PREFERRED_TILES[] = {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x160,
                                        CUBLASLT_MATMUL_TILE_176x128};
// An output is large from this many elements on: at least 2.8 tiles of 176x128 for each multiprocessor.
constexpr int64_t LARGE_OUTPUT_ELEMENTS = 1 << 23;

bool should_prefer_tiles(GemmKind kind, bool fast_or_bf16, const TensorRef& out) {
    return fast_or_bf16 && kind != GemmKind::Wgrad && out.rows * out.cols >= LARGE_OUTPUT_ELEMENTS &&
           device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
}

// The index of an algorithm's tile in PREFERRED_TILES, or their number if the tile is not among them.
size_t preference_of_tile(const cublasLtMatmulAlgo_t& algorithm) {
    uint32_t tile = 0;
    cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile,
                                         nullptr);
    return size_t(std::find(std::begin(PREFERRED_TILES), std::end(PREFERRED_TILES), tile) - PREFERRED_TILES);
}

// The algorithms that cuBLASLt proposes, in its own order or, with prefer_tiles, those with PREFERRED_TILES
// first. Algorithms that store partial sums in the output's format are excluded, because BF16 would round
// each of them. With prefer_tiles all algorithms that split the sums are excluded. Then every candidate adds
// in the same order, so the bits of the output do not depend on the tiles.
std::vector<cublasLtMatmulAlgo_t> candidate_algorithms(cublasLtHandle_t handle, Description& description,
                                                       bool prefer_tiles) {
    cublasLtMatmulPreferenceOpaque_t preference;
    check_description(cublasLtMatmulPreferenceInit(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
        check_description(cublasLtMatmulPreferenceSetAttribute(&preference, name, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{CublasGemms::SCRATCH_BYTES});
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(prefer_tiles ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(name, uint32_t{16});
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    // The status is not checked: if the call fails, n stays 0, and run() throws an Error
    int n = 0;
    cublasLtMatmulAlgoGetHeuristic(handle, &description.operation, &description.a_layout,
                                   &description.b_layout, &description.out_layout, &description.out_layout,
                                   &preference, CANDIDATES, found, &n);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
    if (prefer_tiles)
        std::stable_sort(algorithms.begin(), algorithms.end(), [](const auto& one, const auto& other) {
            return preference_of_tile(one) < preference_of_tile(other);
        });
    return algorithms;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------
// The launch

CublasGemms::~CublasGemms() {
    if (handle_) cublasLtDestroy(handle_);
}

void CublasGemms::run(GemmKind kind, const Operand& left, const Operand& right, const TensorRef& out,
                      cudaStream_t stream, const GemmOptions& options) {
    const OperandKind left_kind = kind == GemmKind::Fprop ? OperandKind::X : OperandKind::G;
    const OperandKind right_kind = kind == GemmKind::Wgrad ? OperandKind::X : OperandKind::W;
    const CublasMatrix a = matrix_of(right, /*is_a=*/true, sum_along(kind, right_kind));
    const CublasMatrix b = matrix_of(left, /*is_a=*/false, sum_along(kind, left_kind));
    const int64_t depth = a.factor_cols();
    require(b.factor_rows() == depth && a.factor_rows() == out.cols && b.factor_cols() == out.rows,
            "the shapes of a GEMM do not fit");
    const bool fast = fast_accumulation_[int(kind)];
    Description description(a, b, out, options.bias, fast);
    // Launches the GEMM, and returns the status
    const auto try_algorithm = [&](const cublasLtMatmulAlgo_t& algorithm) {
        const float one = 1, beta = options.overwrite ? 0 : 1;
        const cublasStatus_t status =
            cublasLtMatmul(handle_, &description.operation, &one, a.data, &description.a_layout, b.data,
                           &description.b_layout, &beta, out.data, &description.out_layout, out.data,
                           &description.out_layout, &algorithm, scratch, SCRATCH_BYTES, stream);
        if (status != CUBLAS_STATUS_SUCCESS)
            cudaGetLastError();  // or the next launch would report this error
        return status;
    };
    const Key key{.kind = kind,
                  .cublas_a = a.format,
                  .cublas_b = b.format,
                  .out = out.format.element_format,
                  .cublas_a_scales = a.scale_mode,
                  .cublas_b_scales = b.scale_mode,
                  .rows = out.rows,
                  .cols = out.cols,
                  .depth = depth,
                  .biased = options.bias != nullptr};
    unless_dry_run(stream, "GEMM", [&] {
        if (!handle_) check_cublas(cublasLtCreate(&handle_), "Starting cuBLASLt failed");
        const auto chosen = algorithms_.find(key);
        if (chosen != algorithms_.end()) {
            check_cublas(try_algorithm(chosen->second), "A GEMM failed");
            return;
        }
        // The first GEMM with this key: the first candidate that can be launched is chosen
        const bool fast_or_bf16 = fast || a.format == Format::BF16;
        const bool prefer_tiles = should_prefer_tiles(kind, fast_or_bf16, out);
        cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
        for (const cublasLtMatmulAlgo_t& candidate :
             candidate_algorithms(handle_, description, prefer_tiles)) {
            status = try_algorithm(candidate);
            if (status == CUBLAS_STATUS_SUCCESS) {
                algorithms_[key] = candidate;
                break;
            }
        }
        check_cublas(status, "A GEMM failed");
    });
}

}  // namespace coat::gpu
