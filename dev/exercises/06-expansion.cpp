// 6 - Dynamic range expansion (lesson 9; about 30 minutes)
//
// Predict k first, on paper: a moment group whose largest magnitude is 100 times its smallest; one with 10
// times; one with 2^17.8 = 229,376 times. Which of the three gains most precision?
//
// Then write three functions. expansion_factor: k, such that a moment group that spans max / min, its largest
// over its smallest magnitude that is not zero, spans all of E4M3 (448 down to the smallest subnormal value)
// once each magnitude is raised to the power k. expand: sign and magnitude of x as they are stored, max as
// 448. contract: its inverse.
//
// Watch for:
//   k is rounded to the nearest multiple of 1/256, and is at least 1/16 and at most 64.
//   max is above 0. With equal magnitudes log(max / min) is 0, and k infinite before it is limited.
//   |x| / max and max / min may underflow or overflow: subtract logarithms in place of dividing.
//   In contract the power may underflow although max times the power does not.
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
