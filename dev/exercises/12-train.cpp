// 12 - Train a small model with your functions (lessons 5 to 9; about 40 minutes)
//
// y = linear(swiglu(linear(norm(x)))), and the loss is half the mean of (y - target)^2. Write one step of
// training that calls what you wrote in the exercises before: quantize_to_groups (3), adamw (7), linear (8),
// norm_backward (10) and swiglu_backward (11). If some of them are not solved yet, the program names these
// and ends. Else it trains 100 steps, and prints your loss beside the reference's.
//
// A step quantizes the norm's input, m.x, in groups; then come the norm, a linear layer with m.gate_up, its
// output in groups, SwiGLU, a linear layer with m.down, and the loss. Backward goes the same way back, and
// AdamW updates the three weights. Return the loss.
//
// Find out: which tensors must forward keep for backward? What does norm read: m.x, or its groups?
//
// Watch for:
//   linear computes all three GEMMs. In forward, give it any g of y's shape, such as zeros, and use only y.
//   (Then dgrad and wgrad are computed for nothing, which costs little in so small a model.)
//   AdamW comes last, because backward reads the weights of forward.
//
// train.h has your functions. given:: (in capstone.h) has norm_forward, swiglu_forward, loss, groups(x,
// quantize_to_groups), which calls your function, and update(weight, gradient, t, adamw), which calls yours
// for each 128 parameters of a weight.
#include "train.h"

double step(SmallModel& m, int t) {
    return 0;  // your code
}

int main() { return train_and_compare(step); }
