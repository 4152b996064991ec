// 11 - SwiGLU backward from 1x16 groups (lesson 7; about 20 minutes)
//
// Forward computed act = silu(gate) up, with silu(a) = a s and s = 1 / (1 + exp(-a)). It saved gate and up in
// 1x16 groups, as one matrix (N, 2 F): a row has F values of gate, then F of up. dact (N, F) is the gradient
// of act. Write dgate_up (N, 2 F), the gradients of gate and up, which is undefined before the call. You need
// the derivative silu'(a) = s (1 + a (1 - s)).
//
// Find out: how does it follow from silu(a) = a s? What is it at a = 0?
//
// codes and dgate_up are (N, 2 F), scales (N, 2 F / 16). In a row of each, what belongs to gate comes
// first, and then what belongs to up. given::decode(code) is the value of a code.
#include "judge.h"

void swiglu_backward(int N, int F, const uint8_t* codes, const float* scales, const float* dact,
                     float* dgate_up) {
    // your code
}

int main() { return judge::swiglu_backward(swiglu_backward); }
