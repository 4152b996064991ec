// 11 - SwiGLU backward from 1x16 groups (lesson 7; about 20 minutes)
//
// Forward computed act = silu(gate) up, with silu(a) = a s and s = 1 / (1 + exp(-a)). It saved gate and up in
// 1x16 groups, as one matrix (N, 2 F): a row has F values of gate, then F of up. Given dact (N, F), write
// dgate_up (N, 2 F), which is undefined before.
//
// Find out: what is the derivative of silu, written with s and a?
//
// codes and dgate_up are (N, 2 F), scales (N, 2 F / 16). In a row of each, what belongs to gate comes
// first, and then what belongs to up. given::decode(code) is the value of a code.
#include "judge.h"

void swiglu_backward(int N, int F, const uint8_t* codes, const float* scales, const float* dact,
                     float* dgate_up) {
    // your code
}

int main() { return judge::swiglu_backward(swiglu_backward); }
