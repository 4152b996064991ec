// gpu/gemm.h - matrix multiplication (GEMM) through cuBLASLt, as one function on operands, which carry their
// scales.
//
// A linear layer has three GEMMs (row-major; N tokens; w is (out, in)):
//   Fprop   y  (N, out)  = x (N, in)    w^T        (+ bias)      reduces over input features
//   Dgrad   dx (N, in)   = dy (N, out)  w                        reduces over output features
//   Wgrad   dw (out, in) = dy^T         x (N, in)                reduces over tokens
// In FP32 and BF16 each operand is read as it is stored. In FP8 (Operand) Dgrad reads w.transposed, and Wgrad
// reads dy.transposed and x.transposed; the row-major codes may then be missing.
#pragma once
#include <cublasLt.h>

#include <array>
#include <map>

#include "operators.h"

namespace coat::gpu {

enum class Gemm : uint8_t { Fprop, Dgrad, Wgrad };

struct GemmOptions {
    bool accumulate = false;     // out += the product; otherwise out = the product
    const void* bias = nullptr;  // (out), in the output's format: Fprop adds it to each row
};

class Gemms {
public:
    static constexpr size_t SCRATCH = 32 << 20;  // bytes that cuBLAS recommends on Hopper
    void* const scratch;                         // SCRATCH bytes; between GEMMs others may use it

    // fast_accumulation: for each Gemm (formats.h, FastAccumulation).
    Gemms(void* scratch, const FastAccumulation& fast_accumulation)
        : scratch(scratch), fast_accumulation_(fast_accumulation) {}
    ~Gemms();
    Gemms(const Gemms&) = delete;

    // Launches a GEMM. left, right: (x, w) for Fprop, (dy, w) for Dgrad, (dy, x) for Wgrad. out: FP32 or
    // BF16. A combination that cuBLASLt has no GEMM for is an Error.
    void run(Gemm kind, const Operand& left, const Operand& right, const TensorRef& out, cudaStream_t stream,
             const GemmOptions& options = {});

private:
    // What the choice of an algorithm depends on: it is made once for each Key.
    struct Key {
        Gemm kind;
        Format a, b, out;
        int32_t a_scales, b_scales;  // cuBLASLt's scale modes
        int64_t rows, cols, depth;   // of out, and of the reduction
        bool biased;
        auto operator<=>(const Key&) const = default;
    };

    cublasLtHandle_t handle_ = nullptr;  // null until the first GEMM
    const FastAccumulation fast_accumulation_;
    std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace coat::gpu
