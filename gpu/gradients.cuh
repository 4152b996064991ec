// gpu/gradients.cuh - what any optimizer needs before its update: the gradient norm, clipping, steps that are
// skipped, and sums over ranks (gradients.cu). No function allocates or waits; all launch on the given CUDA
// stream.
#pragma once
#include "parameters.cuh"

namespace coat::gpu {

// What a step knows of its gradients, on the device. Cleared before the step; each bucket adds to it.
struct GradientState {
    double squares, norm;  // of all buckets so far, before clipping
    float clip_factor;     // of the gradients, by clipping: limit / norm, or 1
    // Not 0: something was not finite, on any rank. Then no rank updates anything from this bucket on, and
    // the next step has the same bias correction.
    uint32_t skip;
};

// *checked = *loss; or NaN for the rest of the step if one of n amaxes is not finite, because an FP8 code
// would hide that.
void checked_loss(const AmaxAndScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s);
// Sums of squares, by shard units: SHARD_UNIT elements of a parameter (model.h). Added in a fixed order, they
// give the same norm for any number of ranks.
//   gradients       begin with the element `first` of the rank's order
//   sums            (1 + shard_units): *loss (0 if it is null), then those of the shard units from
//                   `first_shard_unit` on; 0 where the shard unit is another rank's
void gradient_squares(const Segment* segments, int number_of_segments, const void* gradients, Format format,
                      int64_t first, int64_t first_shard_unit, int64_t shard_units, const double* loss,
                      double* sums, cudaStream_t s);
// Adds them to the state: those of all ranks, (ranks, 1 + shard_units). For a shard unit of a matrix one of
// them at most is not 0, for one of a vector they are equal. clip: the limit of the norm; 0: none.
void gradient_norm(const double* sums, int64_t shard_units, int64_t ranks, float clip, GradientState* state,
                   cudaStream_t s);

// sum[i] = round(sum[i] + g_0[i] + g_1[i] + ...) over the ranks, added in FP32 and rounded once; or without
// the old sum. g_r = received + r * n, without a place for this rank, whose own gradients are at `own`.
void add_gradients(void* sum, bool assign, const void* own, const void* received, Format format, int64_t n,
                   int64_t rank, int64_t ranks, cudaStream_t s);
// amax = the largest of all ranks: theirs are (ranks, n). scale = amax / fmax, or the delayed scale.
void combine_amaxes(AmaxAndScale* scales, const AmaxAndScale* theirs, int64_t n, int64_t ranks, Format fp8,
                    cudaStream_t s);

}  // namespace coat::gpu
