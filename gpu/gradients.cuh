// gpu/gradients.cuh - what any optimizer needs around its update: first weights, FP32 masters, the gradient
// norm, clipping, steps that are skipped, and sums over ranks (gradients.cu).
//
// All parameters lie in one flat order (model.h, parameters()): each has `size` elements from its `offset`
// on. The padding up to a multiple of MOMENT_GROUP stays zero. No function allocates or waits; all launch on
// the given CUDA stream.
#pragma once
#include "../plan.h"
#include "tensor.cuh"

namespace coat::gpu {

// BF16 weights have the int16 remainder of their FP32 master beside them in the same order. Without
// remainders they are all there is, and the optimizer rounds them stochastically. In the fp32 recipe the
// weights are the masters.
struct Weights {
    void* values;        // (total) BF16 or FP32
    int16_t* remainder;  // (total); null if the weights are FP32, or have no master
    Format format;
};
// The first values of a parameter (model.h, initial()): the slice `weight` of it at element weight_at, and
// the remainders of the slice `state` at state_at. used: used_elements() of model.h; the rest is 0.
void initialize(const Weights& w, const Param& p, const ShardPlace& at, uint64_t index, int64_t used,
                uint64_t seed, cudaStream_t s);
void split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n, cudaStream_t s);
void join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n, cudaStream_t s);

// One moment of one parameter. FP8 in groups: codes, and (max, k) for each group. FP8 and FP16 with one scale
// per tensor: codes, and max[0] that decodes them; max[1] is room for the next one. FP32 and BF16: codes
// alone.
struct MomentView {
    void* data;       // (padded_size) of format; padding stays zero
    float *max, *k;   // k is null without expansion
    Format format;
};
// What this rank updates of one parameter: a row of a table on the device. With one rank all orders are the
// flat order, so to_weight and to_flat are 0.
struct Segment {
    int64_t offset, size;  // among the rank's masters and gradients; elements
    MomentView m, v;
    bool decays;
    TensorScale* amax;      // of the new weights; may be null
    int64_t to_weight = 0;  // what to add to an offset to find the weight among the rank's weights,
    int64_t to_flat = 0;    // and to find the element in the flat order
    int64_t shard_chunk = 0;  // number of its first shard chunk among those of all parameters
};

// What a step knows of its gradients, on the device, so that the host need not wait. Cleared before the step;
// each bucket adds to it.
struct GradientState {
    double squares, norm;  // of all buckets so far, before clipping
    float clip_factor;     // of this bucket's gradients, by clipping: limit / estimated norm, or 1
    // Not 0: something was not finite. Neither this bucket nor a later one of the step is updated.
    uint32_t skip;
};
struct Clipping {
    float limit;                 // of the norm; 0: none
    double norm_correction = 1;  // estimated ratio of the whole norm to the norm so far
};

// *checked = *loss; or NaN for the rest of the step if one of n amaxes is not finite, because an FP8 code
// would hide that.
void checked_loss(const TensorScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s);
// A rank's share of work that any rank could do: consecutive shard chunks of every segment. A shard chunk is
// SHARD_CHUNK elements of a parameter (model.h). It is not the chunk of 8 elements that a thread loads at
// once (gpu/tensor.cuh).
struct Share {
    int64_t rank = 0, ranks = 1;
};
// Sums of squares, by shard chunks. Added in a fixed order, they give the same norm for any number of ranks.
//   gradients       begin with the element `first` of the rank's order
//   sums            (1 + shard_chunks): *loss (0 if it is null), then those of the shard chunks from
//                   `first_shard_chunk` on; 0 where the shard chunk is another rank's
//   share           of the shard chunks, where every rank has all gradients; else the default
void gradient_squares(const Segment* segments, int number_of_segments, const void* gradients, Format format,
                      int64_t first, int64_t first_shard_chunk, int64_t shard_chunks, const Share& share,
                      const double* loss, double* sums, cudaStream_t s);
// Adds them to the state: those of all ranks, (ranks, 1 + shard_chunks), of which one at most is not 0 for a
// shard chunk.
void gradient_norm(const double* sums, int64_t shard_chunks, int64_t ranks, const Clipping& clip,
                   GradientState* state, cudaStream_t s);

// sum[i] = round(sum[i] + g_0[i] + g_1[i] + ...) over the ranks, added in FP32 and rounded once; or without
// the old sum. g_r = received + r * n, without a place for this rank, whose own gradients are at `own`.
void add_gradients(void* sum, bool assign, const void* own, const void* received, Format format, int64_t n,
                   const Share& share, cudaStream_t s);
// amax = the largest of all ranks: theirs are (ranks, n). scale = amax / fmax, or the delayed scale.
void combine_amaxes(TensorScale* scales, const TensorScale* theirs, int64_t n, int64_t ranks, const Quant& q,
                    cudaStream_t s);

}  // namespace coat::gpu
