// gpu/gemm.h - matrix multiplication (GEMM) through cuBLASLt, as one function on operands, which carry their
// scales. The three GEMMs of a linear layer, fprop, dgrad and wgrad, are explained in common/formats.h. Which
// form of its operands each of them reads is said at Operand in gpu/tensors.h.
#pragma once
#include <cublasLt.h>

#include <array>
#include <map>

#include "../common/recipes.h"
#include "tensors.h"

namespace coat::gpu {

// Which of the three GEMMs of a linear layer. (FastAccumulation of common/recipes.h has the same order.)
enum class GemmKind : uint8_t { Fprop, Dgrad, Wgrad };

// Along what a GEMM sums in one of its two operands (table: common/formats.h).
inline SumAlong sum_along(GemmKind gemm, OperandKind operand) {
    if (gemm == GemmKind::Fprop) return SumAlong::Row;
    if (gemm == GemmKind::Wgrad) return SumAlong::Column;
    return operand == OperandKind::G ? SumAlong::Row : SumAlong::Column;  // dgrad: of g, and of w
}

struct GemmOptions {
    bool overwrite = true;       // out = the product; otherwise out += the product
    const void* bias = nullptr;  // (out features), in the format of out; added to each row of out
};

class CublasGemms {
public:
    static constexpr size_t SCRATCH_BYTES = 32 << 20;  // as cuBLAS recommends on Hopper
    void* const scratch;  // SCRATCH_BYTES bytes; between GEMMs other kernels may use them

    // fast_accumulation says for each GemmKind whether it sums in fewer bits (common/recipes.h,
    // FastAccumulation).
    CublasGemms(void* scratch, const FastAccumulation& fast_accumulation)
        : scratch(scratch), fast_accumulation_(fast_accumulation) {}
    ~CublasGemms();
    CublasGemms(const CublasGemms&) = delete;

    // Launches a GEMM:
    //
    //   kind    out                  left   right
    //   Fprop   y = x w^T + bias     x      w
    //   Dgrad   dx = g w             g      w
    //   Wgrad   dw = g^T x           g      x
    //
    // out is in FP32 or BF16. If cuBLASLt has no GEMM for a combination of formats, that is an Error.
    void run(GemmKind kind, const Operand& left, const Operand& right, const TensorRef& out,
             cudaStream_t stream, const GemmOptions& options = {});

private:
    // What the choice of an algorithm depends on. The algorithm is chosen once for each Key. (One algorithm
    // serves both values of GemmOptions::overwrite. Whether accumulation is fast follows from `kind`.)
    struct Key {
        GemmKind kind;
        // A is made of `right`, and B of `left` (gemm.cpp says why)
        Format cublas_a, cublas_b, out;
        int32_t cublas_a_scales, cublas_b_scales;  // cuBLASLt's scale modes
        int64_t rows, cols;                        // the shape of `out`
        int64_t depth;                             // the length of the dimension that is summed over
        bool biased;
        auto operator<=>(const Key&) const = default;
    };

    cublasLtHandle_t handle_ = nullptr;  // null until the first GEMM
    const FastAccumulation fast_accumulation_;
    std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace coat::gpu
