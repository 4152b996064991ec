// gpu/parameters.cuh - how a parameter lies in a GPU's memory: its weights with their FP32 masters, its
// moments, and its row in the table of an update (parameters.cu: first values).
//
// All parameters lie in one flat order (model.h, parameters()): each has `size` elements from its `offset`
// on. The padding up to a multiple of MOMENT_GROUP stays zero. No function allocates or waits; all launch on
// the given CUDA stream.
#pragma once
#include "../program/plan.h"
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

// One moment of one parameter. FP8 in groups: codes, and (max, k) for each group. FP8 and FP16 with one scale
// per tensor: codes, and max[0] that decodes them; max[1] is room for the next one. FP32 and BF16: no
// scale.
struct MomentView {
    void* data;      // (padded_size) of format; padding stays zero
    float *max, *k;  // k is null without expansion
    Format format;
};
// What this rank updates of one parameter: a row of a table on the device. With one rank all orders are the
// flat order, so to_weight and to_flat are 0.
struct Segment {
    int64_t offset, size;  // among the rank's masters and gradients; elements
    MomentView m, v;
    bool decays;
    AmaxAndScale* amax;      // of the new weights; may be null
    int64_t to_weight = 0;   // what to add to an offset to find the weight among the rank's weights,
    int64_t to_flat = 0;     // and to find the element in the flat order
    int64_t shard_unit = 0;  // number of its first shard unit among those of all parameters
};

bool kernels_fit();  // whether this program was compiled for the GPU in use

// The first values of a parameter (model.h, initial()): the slice `weight` of it at element weight_at, and
// the remainders of the slice `state` at state_at. used: used_elements() of model.h; the rest is 0.
void initialize(const Weights& w, const Param& p, const ShardPlace& at, uint64_t index, int64_t used,
                uint64_t seed, cudaStream_t s);

}  // namespace coat::gpu
