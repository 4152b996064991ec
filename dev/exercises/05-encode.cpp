// 5 - Encode: the nearest code of a value (lesson 1; about 30 minutes)
//
// Write the inverse of exercise 1, for the format f (M = f.mantissa, bias = f.bias). Divide |x| by the
// distance between the two codes around it, round the quotient to a whole number, and put the exponent
// field in front.
//
// Find out: how far apart are codes between 2^e and 2^(e + 1)? How far apart are subnormal ones, and at which
// e do they begin? What becomes of the mantissa if rounding reaches the next power of two?
//
// Watch for:
//   A tie, halfway between two codes, goes to the even code. std::nearbyint rounds so; std::round does not.
//   Whatever is above the value f.max, infinity too, becomes the code of f.max: 0x7E in E4M3, 0x7B in E5M2.
//   NaN (std::isnan) is 0x7F. Bit 7 is the sign, of zero and NaN too: std::signbit(x).
//
// std::ilogb(x) is the largest e with 2^e <= |x|, hugely negative for 0; std::ldexp(x, e) is x 2^e.
#include "judge.h"

uint8_t encode(const Fp8& f, float x) {
    return 0;  // your code
}

int main() { return judge::encode(encode); }
