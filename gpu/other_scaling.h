// gpu/other_scaling.h - how the recipes rowwise, deepseek and te, with which COAT is compared, scale the
// operands of a GEMM: per row, in blocks, and delayed (kernels: gpu/other_scaling.cu). The rules of
// gpu/operators.h hold here, too.
#pragma once
#include "operators.h"

namespace coat::gpu {

// quantize() calls these two functions. quantize_in_blocks() makes codes with scales per row, 1x128 or
// 128x128, just in time, and updates the amax. quantize_delayed() makes codes with a delayed scale per
// tensor, and finds the amax for the scales of later steps.
void quantize_in_blocks(const LazyTensor& x, const Operand& out, QuantStats* quant_stats,
                        cudaStream_t stream);
void quantize_delayed(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Delayed scaling (te). The scale of a step is delayed_scale, which follows from the amaxes of earlier steps.
// Which function writes a field of AmaxAndScale:
//
//   amax            quantize(). It covers a whole step: the caller clears it before every step, not before
//                   every micro-batch
//   delayed_scale   update_delayed_scales(), after each step
//   scale           quantize(), and update_delayed_scales()
//
// While the history is empty, delayed_scale is 0, and everything is as if scaling were just in time.

// The scales of n tensors in the format fp8, and the amaxes that each had in its last `length` steps.
struct DelayedScales {
    AmaxAndScale* scales;  // (n)
    float* histories;      // (n, length), the newest first
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
