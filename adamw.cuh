// adamw.cuh - the paper's section 4 on the GPU: weights, gradient norm, AdamW with FP8 moments (adamw.cu).
//
// All parameters lie in one flat order (coat.h, parameters()): parameter p has the elements [offset, offset +
// size). The padding up to a multiple of MOMENT_GROUP stays zero. No function allocates or waits; all launch
// on the given CUDA stream.
#pragma once
#include "gpu/tensor.cuh"

namespace coat::gpu {

// BF16 weights have the int16 remainder of their FP32 master beside them in the same order. Without
// remainders they are all there is, and the optimizer rounds them stochastically. In the fp32 recipe the
// weights are the masters.
struct Weights {
    void* values;        // (total) BF16 or FP32
    int16_t* remainder;  // (total); null if the weights are FP32, or have no master
    Format format;
};
void initialize(const Weights& w, const Param& p, uint64_t index, int64_t live, uint64_t seed,
                cudaStream_t s);
void split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n, cudaStream_t s);
void join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n, cudaStream_t s);

// One moment of one parameter. FP8 in groups: codes, and (max, k) for each group. FP8 and FP16 with one scale
// per tensor: codes, and max[0] that decodes them; max[1] is room for the next one. FP32 and BF16: codes
// alone.
struct MomentView {
    void* codes;      // (padded_size) of format; padding stays zero
    float *max, *k;   // k is null without expansion
    Format format;
};
struct Segment {  // one parameter, in the flat order; a row of a table on the device
    int64_t offset, size;
    MomentView m, v;
    bool decays;
    TensorScale* amax;  // of the new weights; may be null
};

// What a step knows of its gradients, on the device, so that the host need not wait. Cleared before the step;
// each bucket adds to it.
struct GradientState {
    double squares, norm;  // of all buckets so far, before clipping
    float scale;           // of this bucket's gradients: clip / (norm_correction * norm), or 1
    uint32_t
        skip;  // not 0: something was not finite; neither this bucket nor a later one of the step is updated
};
struct Clipping {
    float limit;                 // of the norm; 0: none
    double norm_correction = 1;  // estimated ratio of the whole norm to the norm so far
};

// *checked = *loss; or NaN for the rest of the step if one of n amaxes is not finite, because an FP8 code
// would hide that.
void checked_loss(const TensorScale* scales, int64_t n, const double* loss, double* checked, cudaStream_t s);
// The norm of a bucket: n elements of the flat order. loss may be null. Workspace: GRADIENT_PARTIALS doubles.
inline constexpr int GRADIENT_PARTIALS = 1024;
void gradient_norm(const void* gradients, Format format, int64_t n, const double* loss, const Clipping& clip,
                   GradientState* state, double* workspace, cudaStream_t s);

struct Range {  // consecutive elements of the flat order, whole parameters: all, or those of a bucket
    int64_t first, count;
};
// AdamW of a range. `segments` and `gradients` are those of the range; gradients are FP32 or have the format
// of the weights. Every segment's m.format is optimizer.m or FP32, and v's likewise. rounding: rounding_key()
// of this step, for weights without a master. Clear the segments' amaxes first; they are taken even if the
// step is skipped.
void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments,
           const Range& range, const Weights& w, uint64_t rounding, const void* gradients, Format format,
           const GradientState* state, cudaStream_t s);

// For the report: computes the new moments of one parameter, and adds the error of storing them to *m_stats and
// *v_stats. segment: its row of the table, on the device; size: its elements; first: where
// `gradients` begin in the flat order. Nothing else is changed, but for max[1] of moments with one scale per
// tensor.
void measure_moments(const OptimizerFormat& optimizer, const Segment* segment, int64_t size, const Weights& w,
                     const void* gradients, Format format, int64_t first, QuantStats* m_stats,
                     QuantStats* v_stats, cudaStream_t s);

}  // namespace coat::gpu
