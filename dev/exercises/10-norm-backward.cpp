// 10 - RMSNorm backward from the quantized input (lesson 7; about 30 minutes)
//
// Forward computed, for each of N tokens with C values, y = x r weight with r = 1 / sqrt(mean(x^2) + eps). It
// saved x in 1x16 groups only, and computed y from these groups, too. So backward decodes x, and computes r
// again. dy is the gradient of y. Write dx (N, C), and dweight (C), which is a sum over all tokens. Both are
// undefined before the call. eps = 1e-5.
//
// Find out, with the chain rule: each x of a token changes its own y. It also changes r, which all y of the
// token share; that part has a mean over the token. (Lesson 7 has the result.)
//
// codes and dy are (N, C), scales (N, C / 16), weight (C). given::decode(code) is the value of a code.
#include "judge.h"

void norm_backward(int N, int C, const uint8_t* codes, const float* scales, const float* weight,
                   const float* dy, float* dx, float* dweight) {
    // your code
}

int main() { return judge::norm_backward(norm_backward); }
