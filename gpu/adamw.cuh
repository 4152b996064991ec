// adamw.cuh - the paper's section 4 on the GPU: AdamW with FP8 moments and dynamic range expansion
// (adamw.cu); moments that are not in FP8 groups are those of other_optimizers.cu.
//
// Parameters, their order and the table of an update are those of gpu/parameters.cuh. No function allocates
// or waits; all launch on the given CUDA stream.
#pragma once
#include "parameters.cuh"

namespace coat::gpu {

// AdamW of a range of the rank's order, whole segments: all, or those of a bucket. `segments` and `gradients`
// are those of the range; gradients are FP32 or have the format of the weights. Every segment's m.format is
// optimizer.m or FP32, and v's likewise. rounding: rounding_key() of this step, for weights without a master.
// The segments' amaxes become those of the new weights; where state->skip is set, all stays as it was.
void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments,
           const Range& range, const Weights& w, uint64_t rounding, const void* gradients, Format format,
           const GradientState* state, cudaStream_t s);

// -----------------------------------------------------------------------------------------------------------
// What the kernels of an update share

#ifdef __CUDACC__

// The constants of a step. The bias corrections are computed in double on the host.
struct Factors {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, decay;
    float root_factor, scaled_eps;  // see adamw_element
};

// How one of the moments is stored in FP8 or FP16, as the kernels need it. For FP32 and BF16 it says nothing.
struct MomentFormat {
    bool e5m2 = false, expand = false, per_tensor = false;
    float max = 1, min = 1;            // FMAX and FMIN
    float log_max = 0, log_range = 1;  // log2(FMAX) and log2(FMAX / FMIN)
};

// Whether a moment has scales. FP32 moments have none: those of norm weights and biases, in every optimizer.
inline __device__ bool scaled(const MomentView& m) {
    return m.format != Format::F32 && m.format != Format::BF16;
}

inline __device__ uint32_t code_of(uint2 codes, int j) {  // code j of eight
    return (j < 4 ? codes.x : codes.y) >> 8 * (j % 4) & 0xFFu;
}

struct AdamArguments {
    Factors f;
    MomentFormat m, v;
    const Segment* segments;
    int number_of_segments;
    int64_t first, groups;  // of the range: its first element, how many groups it has
    Weights w;
    uint64_t rounding;
    EitherDense gradients;  // of the range
    const GradientState* state;

    __device__ bool in_fp8_groups(const Segment& s) const { return scaled(s.m) && !m.per_tensor; }
};

//   m = b1 m + (1 - b1) g
//   v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
// m needs no division by c1 = 1 - b1^t, because with c2 = 1 - b2^t
//   m / c1 / (sqrt(v / c2) + eps) = m / (sqrt(v) root_factor + scaled_eps),   root_factor = c1 / sqrt(c2).
// On entry m lacks a factor: the max of its group with expansion, else its scale. keep_m is b1 times that
// factor: so one FMA decays m and completes it. The same holds for v.
inline __device__ void adamw_element(const Factors& f, float keep_m, float keep_v, float decay, float g,
                                     float& m, float& v, float& w) {
    // The added 0 turns -0 into 0: a moment that is zero has the code 0, as on the CPU, never that of -0.
    m = __fmaf_rn(keep_m, m, __fmaf_rn(f.one_minus_beta1, g, 0.0f));
    v = __fmaf_rn(keep_v, v, f.one_minus_beta2 * (g * g));
    const float update = m * fast_reciprocal(__fmaf_rn(fast_sqrt(v), f.root_factor, f.scaled_eps));
    w = __fmaf_rn(-f.lr, __fmaf_rn(decay, w, update), w);
}

// Clears the amaxes of the weights, then updates the segments whose moments are not in FP8 groups
// (other_optimizers.cu). fp8_groups: other segments are.
void update_without_groups(const AdamArguments& a, bool fp8_groups, cudaStream_t s);

#endif  // __CUDACC__

}  // namespace coat::gpu
