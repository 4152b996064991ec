// program/validation.h - what a run measures on validation text (validation.cpp). Every rank calls these
// functions at the same time.
#pragma once
#include "run.h"

namespace coat {

struct Validation {
    double loss;      // in nats: the mean over the scored targets of the evaluated windows
    int64_t targets;  // the number of scored targets
};
Validation measure_validation(Run& run);  // Error if no target is scored, or if the loss is not finite

struct Sample {
    std::vector<int32_t> tokens;  // empty if no window of the text has room for a continuation
    int64_t prompt;  // the first `prompt` tokens are validation text; the model has made the rest
};
Sample draw_sample(const Run& run);

// How well FP8 represents each kind of tensor, measured on one micro-batch, forward and backward. If the run
// has made a step, also the moments that the gradients of this micro-batch would lead to, and the expansion
// exponents k in use, on all ranks.
QuantReport measure_quantization(Run& run);

}  // namespace coat
