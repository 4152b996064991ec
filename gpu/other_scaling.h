// gpu/other_scaling.h - how the recipes rowwise, deepseek and te, with which COAT is compared, scale the
// operands of a GEMM: per row, in blocks, and delayed (kernels: gpu/other_scaling.cu). The rules of
// gpu/tensors.h hold here, too.
#pragma once
#include "../common/quant_errors.h"
#include "tensors.h"

namespace coat::gpu {

// The recipes rowwise and deepseek: one scale for each scale block. quantize_operand() calls this function.
// It computes the scales from x, just in time, stores them in out.block_scales and
// out.transposed_block_scales, and makes the codes. out.tensor.tensor_scale->amax gets the amax of x, which
// only shows whether a value was not finite.
//
// Row-major and transposed codes have scales of their own. They have the layout that cuBLASLt reads. These
// are the shapes of the block scales of a (rows, cols) operand; for transposed_block_scales exchange rows and
// cols:
//   per row    (rows)
//   1x128      (cols / 128, rows)
//   128x128    (rows / 128, cols / 128), each row padded to a multiple of four
void quantize_in_blocks(const LazyTensor& x, const Operand& out, QuantStats* quant_stats,
                        cudaStream_t stream);
// The number of block scales of codes (rows, cols), with padding. It is 0 for an operand that has a single
// scale, and for one that is not in FP8.
inline int64_t block_scale_count(const TensorFormat& format, int64_t rows, int64_t cols) {
    if (!format.is_fp8() || format.granularity == PER_TENSOR) return 0;
    return format.rows_of_scales(rows) *
           round_up(format.cols_of_scales(cols), format.granularity == PER_128x128 ? 4 : 1);
}

// Delayed scaling (te), one scale for the tensor. quantize_operand() calls this function. It makes codes with
// the delayed scale, and finds the amax of x for the scales of later steps.
void quantize_delayed(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// The scale of a step is delayed_scale, which follows from the amaxes of earlier steps. Which function writes
// a field of TensorScale:
//
//   amax            quantize_operand(). It covers a whole step: the caller clears it before every step,
//                   not before every micro-batch
//   delayed_scale   update_delayed_scales(), after each step
//   scale           quantize_operand(), and update_delayed_scales()
//
// While the history is empty, delayed_scale is 0, and everything is as if scaling were just in time.

// The scales of n tensors in the format fp8, and the amaxes that each had in its last `length` steps.
struct DelayedScales {
    TensorScale* scales;  // (n)
    float* histories;     // (n, length), the newest first
    int64_t n;
    int length;
    Format fp8;
};
// After a step, each tensor's amax enters its history. Then delayed_scale = max(history) / FMAX; where this
// maximum is 0 or not finite, delayed_scale stays as it was. *empty += the number of scales whose
// delayed_scale is still 0. If *skipped is not 0, everything stays as it was.
void update_delayed_scales(const DelayedScales& delayed, const uint32_t* skipped, uint32_t* empty,
                           cudaStream_t stream);

}  // namespace coat::gpu
