// gpu/other_scaling.cuh - scales of GEMM operands that the paper does not use: per row, in blocks, and
// delayed. The recipes te, rowwise and deepseek have them. The rules are those of coat.cuh.
#pragma once
#include "coat.cuh"

namespace coat::gpu {

// Maps (row, col) of the tensor to its scale, in the layout that cuBLASLt expects (gpu/tensor.cuh, Operand).
struct ScaleGrid {
    float* scales;             // null: not wanted
    int row_shift, col_shift;  // log2 of a block's sides
    int64_t down, across;      // from one block's scale to the next one's
    int64_t count;             // of all scales
    __device__ float* at(int64_t row, int64_t col) const {
        return scales + (row >> row_shift) * down + (col >> col_shift) * across;
    }
};
// The scales of an operand's row-major or transposed codes, (N, K) with K the GEMM's reduction dimension.
ScaleGrid scale_grid(const Operand& out, bool transposed);

// The scales of x per row, 1x128 or 128x128, for quantize(); *out.amax is updated.
void block_scales(const Lazy& x, const Operand& out, cudaStream_t s);

// Delayed scaling (TransformerEngine's, for comparison).
// After a step the amaxes enter the histories, the newest first, and the next step's scale becomes
// from_history = max(history) 2^margin / FMAX. A maximum that is 0 or not finite leaves it as it was. Nothing
// happens if *skipped is not 0. scales (n); histories (n, length). *empty: + the number of scales that are
// still 0.
void end_delayed_step(AmaxAndScale* scales, int64_t n, float* histories, int length, int margin, Format fp8,
                      const uint32_t* skipped, uint32_t* empty, cudaStream_t s);

}  // namespace coat::gpu
