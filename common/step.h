// common/step.h - a training step: what it is given besides tokens and weights, and what it returns.
#pragma once
#include <algorithm>
#include <cstdint>

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Targets of the loss

// NO_TARGET stands where a target is not scored, for example a token of a user's question: its loss and its
// gradient are 0. All other targets are scored. The loss of a step is the mean over the scored targets of all
// micro-batches of all ranks. (The ranks are the processes of a run.)
inline constexpr int32_t NO_TARGET = -1;

inline int64_t count_scored_targets(const int32_t* targets, int64_t n) {
    return n - std::count(targets, targets + n, NO_TARGET);
}
// The divisor of the mean loss of n targets: the number of scored ones, or 1 if there are none.
inline double divisor_of_mean(const int32_t* targets, int64_t n) {
    return double(std::max<int64_t>(1, count_scored_targets(targets, n)));
}

// -----------------------------------------------------------------------------------------------------------
// The settings of AdamW

// What a step of AdamW is given besides parameters, gradients and moments.
struct AdamWOptions {
    // The number of this update, from 1; skipped steps do not count. The bias correction depends on it, and
    // so do the random bits with which weights without a master are rounded.
    int64_t update_number;
    float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    // The largest norm that all gradients together may have; 0: no clipping.
    float clip = 1.0f;
};

// -----------------------------------------------------------------------------------------------------------
// The result of a step

struct StepResult {
    double loss;       // nats per token: the mean over all scored targets of the step
    double grad_norm;  // of all gradients, before clipping
    // Whether the step was abandoned, for one of these reasons:
    //   - the loss, a gradient or a tensor that was quantized to FP8 was not finite;
    //   - the norm after clipping was 2^62 or more, so that the square of a gradient might not fit into the
    //     formats of v;
    //   - no target is scored.
    // In all three cases nothing was updated. (With --gradients none a GPU may have updated a part of the
    // parameters before it noticed the reason.)
    bool skipped;
    int64_t scored_target_count = 0;  // in all micro-batches of all ranks
};

}  // namespace coat
