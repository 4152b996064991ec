// gpu/quant_report.h - the quantization report (kernel: gpu/quant_report.cu; QuantStats is in
// common/quant_errors.h). It has a kernel of its own, so that training pays nothing for it. The rules of
// gpu/tensors.h hold here, too.
#pragma once
#include "../adamw.h"
#include "../common/quant_errors.h"

namespace coat::gpu {

// Adds to *quant_stats what x loses when it is quantized as `out` says: in 1x16 groups, per tensor, or in
// rows or blocks. It is called when the amax of the tensor, or the scales of its rows or blocks, are known,
// and before codes overwrite x. Where row-major and transposed codes have scales of their own, x counts once
// for each of the two. (In 128x128 blocks it counts once, because both have the same scales.) If quant_stats
// is null, nothing is done.
void measure_quant_errors(const LazyTensor& x, const Operand& out, QuantStats* quant_stats,
                          cudaStream_t stream);

// A step with this gradient, unclipped, and with the default betas would give a parameter of `count` elements
// new moments. Adds to the report what storing these moments would lose. The CPU reference (reference/)
// computes and stores them; only this report calls it. Of a large parameter only a part is measured; the
// report then says so. Waits for the stream.
void measure_moment_errors(const OptimizerFormats& o, const MomentRef& m, const MomentRef& v,
                           const void* gradient, Format format, int64_t count, QuantReport& report,
                           cudaStream_t stream);

}  // namespace coat::gpu
