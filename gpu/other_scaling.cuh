// gpu/other_scaling.cuh - the quantizers of te, rowwise and deepseek, which quantize() in coat.cu calls, and
// where these recipes' scales are.
#pragma once
#include "device.cuh"

namespace coat::gpu {

// Maps (row, col) of the tensor to its scale, in the layout that cuBLASLt expects (operators.h, Operand).
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

// Codes per row, 1x128 or 128x128, with scales of their own, just in time (*out.amax is updated); and codes
// per tensor with a delayed scale, while the amax is taken for later.
void quantize_in_blocks(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);
void quantize_delayed(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);

}  // namespace coat::gpu
