// gpu/report.cuh - the quantization report (coat.h, QuantStats): what quantizing does to the values of a
// tensor. It has a kernel of its own, so that training pays nothing for it. Moments are measured on the host.
#pragma once
#include "coat.cuh"
#include "parameters.cuh"

namespace coat::gpu {

// Adds to *stats what x loses when it is quantized as `out` says: in 1x16 groups; per tensor, before the
// codes may overwrite x; or in blocks, whose scales have been made. Blocks count once for each set of scales:
// row-major, and transposed (128x128 once: these are equal). Nothing where stats is null.
void measure(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);

// Adds the errors of storing the moments that a step with this gradient would give a parameter of `count`
// elements. Of a large parameter only a part is measured; the report then says so. Waits for the stream.
void measure_moments(const OptimizerFormat& o, const MomentView& m, const MomentView& v, const void* gradient,
                     Format format, int64_t count, QuantReport& report, cudaStream_t s);

}  // namespace coat::gpu
