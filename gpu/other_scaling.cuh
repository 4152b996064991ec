// gpu/other_scaling.cuh - where the scales of the recipes rowwise and deepseek are.
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

}  // namespace coat::gpu
