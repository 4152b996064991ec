// 6 - Dynamic range expansion (section 4.2, equation 4)
//
// A group of moments spans max / min, its largest over its smallest magnitude that is not zero. E4M3 spans
// R = 448 / 2^-9 (its smallest subnormal value). Raised to the power k, the group spans all of it:
//   k = log R / log(max / min)
//   expand:    y = sign(x) 448 (|x| / max)^k
//   contract:  x = sign(y) max (|y| / 448)^(1 / k)                   its inverse
//
// Watch for:
//   k is rounded to the nearest multiple of 1/256, and is at least 1/16 and at most 64.
//   max is above 0. With equal magnitudes log(max / min) is 0, and k infinite before it is limited.
//   |x| / max and max / min may underflow or overflow: subtract logarithms in place of dividing.
//   In contract the power may underflow: with r = 2^(log2(|y| / 448) / (2k)), take (max r) r, not max (r r).
//   expand(0) and contract(0) are 0.
// Float is precise enough: std::log2, std::exp2, std::rint, std::fabs, std::min, std::copysign.
#include "judge.h"

float expansion_factor(float max, float min) {
    return 0;  // your code
}

float expand(float x, float max, float k) {
    return 0;  // your code
}

float contract(float y, float max, float k) {
    return 0;  // your code
}

int main() { return judge::expansion(expansion_factor, expand, contract); }
