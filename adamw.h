// adamw.h - the optimizer of section 4 of the paper on the GPU: weights and moments in memory, and their
// update (kernels: adamw.cu; for moments in FP32 or BF16, gpu/other_optimizers.cu). The rules of
// gpu/tensors.h hold here.
//
// Weights, masters, moments and the gradients that AdamW reads lie in memory order: all parameters one after
// the other, each padded to whole moment groups. The padding stays zero.
//
// (Several GPUs can wait. Each of them is a rank, which owns a part of every matrix. Then "parameter" means
// what this rank owns of it, and memory order has only these parts. The flat order, Param::flat_offset, has
// all parameters, whoever owns them. With one GPU the two orders are the same.)
#pragma once
#include "common/architecture.h"
#include "common/step.h"
#include "gpu/tensors.h"

namespace coat::gpu {

// One moment, m or v, of a parameter. In COAT an element is a byte, its FP8 code. 128 consecutive elements
// are a moment group, which has two FP32 numbers (common/formats.h):
//   max   the largest magnitude in the moment group
//   k     the expansion exponent
// They say how the codes are decoded. The paper's scale follows from both, s = max^k / FMAX, so it is not
// stored.
//
// (In other optimizers a moment may be in FP32 or BF16. Then max is null.)
struct MomentRef {
    void* data;     // all elements of the parameter
    float* max;     // one for each moment group
    float* k;       // one for each moment group; null without expansion
    Format format;  // of the elements
};

// BF16 weights, and beside them the int16 remainders of their FP32 masters, in the same order: a weight and
// its remainder together are the master.
//
// (This can wait: the remainders may be null. Then BF16 weights have no masters, and an update rounds them
// stochastically. The FP32 weights of the recipe fp32 are their own masters.)
struct Weights {
    void* values;         // all elements, in memory order
    int16_t* remainders;  // of the same elements
    Format format;        // of values: BF16 or FP32
};

// The kernel of adamw.cu gives a warp 1,024 consecutive elements of a parameter, which are called a bundle.
// (The last bundle of a parameter may have fewer.)
inline constexpr int BUNDLE_SIZE = 8 * MOMENT_GROUP_SIZE;

// A parameter as AdamW sees it. The device has a table of them, in memory order.
struct AdamWParam {
    int64_t memory_offset, size;  // elements before it in memory order, and its own elements
    MomentRef m, v;
    bool decays;
    // The amax of the new weights, which adamw() writes. It is null if the parameter is not the weight of a
    // linear layer. (With delayed scaling it is always null.)
    float* weight_amax;

    // How many bundles all parameters before this one have: the number of its first bundle.
    int64_t bundles_before = 0;

    // The number of its first unit, in the flat order: squares of gradients are summed in units of UNIT_SIZE
    // = 8192 elements (common/ranks.h). (This can wait: gpu/gradient_norm.cu.)
    int64_t first_unit = 0;
    // Elements before the parameter in the flat order, by which random bits are numbered. (This can wait: for
    // weights without masters. The random bits do not depend on the number of ranks. With one GPU this number
    // is memory_offset.)
    int64_t flat_offset = 0;

    // Whether m and v are FP8 codes in moment groups. Then the kernel of adamw.cu updates the parameter, else
    // that of gpu/other_optimizers.cu. (m has moment groups if and only if v has them.)
    COAT_HD bool has_fp8_moment_groups() const { return is_fp8(m.format); }
};

// What a step knows of its gradients, on the device. It is cleared before the step.
struct GradientState {
    double sum_of_squares;  // of all gradients so far, before clipping
    double norm;            // the root of sum_of_squares
    float clip_factor;      // what clipping multiplies the gradients by: limit / norm, or 1
    // Not 0: the step is skipped (StepResult::skipped of common/step.h says when). Then nothing is updated,
    // and the next step has the same bias correction.
    uint32_t skip;
};

// The parameters of an update, and their gradients: all parameters.
//
// (This can wait: with --gradients none they are some neighbours in the table, those of one bucket. A bucket
// is the parameters whose gradients backward completes at the same time: Param::bucket.)
struct ParamsToUpdate {
    const AdamWParam* table;  // (count), on the device
    int count;
    Range elements;          // the elements of these parameters, in memory order
    const void* gradients;   // the gradients of these elements
    Format gradient_format;  // FP32, or that of the weights
};

// Updates parameters by AdamW, and finds the amaxes of the new weights. If state->skip is set, everything
// stays as it was. Matrices have their m in optimizer.m_format and their v in optimizer.v_format. Norm
// weights and biases have FP32 moments. rounding_key: that of this update, for weights without a master.
void adamw(const AdamWOptions& options, const OptimizerFormats& optimizer, const ParamsToUpdate& params,
           const Weights& weights, uint64_t rounding_key, const GradientState* state, cudaStream_t stream);

}  // namespace coat::gpu
