// 12 - Train a small model with your functions (lessons 5 to 9; about 40 minutes)
//
// y = linear(swiglu(linear(norm(x)))), and the loss is half the mean of (y - target)^2. Write one step of
// training that calls what you wrote in the exercises before: quantize_groups (3), adamw (7), linear (8),
// norm_backward (10) and swiglu_backward (11). The program first names those of them that are not solved yet.
// Then it trains 100 steps, and prints your loss beside the reference's.
//
// A step is: the input of norm, m.x, in groups; norm; a linear layer with m.gate_up; its output in groups;
// SwiGLU; a linear layer with m.down; the loss, and the same way back; the three weights. Return the loss.
//
// Find out: which tensors must forward keep for backward? What does norm read: m.x, or its groups?
//
// Watch for:
//   linear computes all three GEMMs. In forward, give it any g of y's shape, for example zeros; only y is
//   used. AdamW comes last: backward reads the weights of forward.
//
// train.h has your functions, and in given:: norm_forward, swiglu_forward, loss, and update(weight, gradient,
// t, adamw), which calls adamw for each 128 parameters of a weight. groups(x, quantize_groups) calls yours.
#include "train.h"

double step(SmallModel& m, int t) {
    return 0;  // your code
}

int main() { return train_and_compare(step); }
