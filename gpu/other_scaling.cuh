// gpu/other_scaling.cuh - where the scales of the recipes rowwise and deepseek lie in memory, for the
// quantizers of gpu/other_scaling.cu and for the quantization report.
#pragma once
#include "device.cuh"

namespace coat::gpu {

// The scales of an operand's codes, in the layout that cuBLASLt reads (other_scaling.h). address() maps an
// element of the tensor to the scale of its scale block.
struct ScaleGrid {
    float* scales;             // null if the operand has no such codes
    int row_shift, col_shift;  // log2 of the rows and of the columns of a scale block
    // The distance from the scale of a scale block to that of the one below it, or to the right of it.
    int64_t down, across;
    int64_t count;  // how many scales there are
    __device__ float* address(int64_t row, int64_t col) const {
        return scales + (row >> row_shift) * down + (col >> col_shift) * across;
    }
};
// The grid of an operand's row-major codes, or of its transposed ones.
ScaleGrid scale_grid(const Operand& out, bool transposed);

}  // namespace coat::gpu
