// 9 - RMSNorm backward from the quantized input (section 5, precision flow)
//
// Forward computed, for each of N tokens with C values, y = x r weight with r = 1 / sqrt(mean(x^2) + eps). It
// saved x in 1x16 groups only, and read these itself. So backward decodes x, and computes r again:
//   x = decode(code) scale of its group
//   d = dy weight          dx = (d - x r mean(d x r)) r          dweight = sum over tokens of dy x r
// The means run over the C values of a token. eps = 1e-5.
//
// codes, dy and dx are (N, C), scales (N, C / 16), weight and dweight (C). given::decode(code): its value.
#include "judge.h"

void norm_backward(int N, int C, const uint8_t* codes, const float* scales, const float* weight,
                   const float* dy, float* dx, float* dweight) {
    // your code
}

int main() { return judge::norm_backward(norm_backward); }
