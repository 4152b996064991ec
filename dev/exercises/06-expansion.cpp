// 6 - Dynamic range expansion (lesson 9; about 30 minutes)
//
// Predict k first, on paper, for three moment groups, whose largest magnitude is 100 times, 10 times and
// 229,376 times their smallest. Which of the three gains most precision?
//
// max and min are the largest and the smallest magnitude of a moment group; zeros do not count. Both are
// above 0. Write three functions:
//   expansion_exponent  k: each magnitude is raised to the power k, so that max / min becomes 448 over
//                       E4M3's smallest subnormal value. k is rounded to the nearest multiple of 1/256; it
//                       is at least 1/16 and at most 64.
//   expand              the value that is encoded for x: |x| is raised to the power k so that max becomes
//                       448, and the sign stays. expand(0) is 0.
//   contract            the inverse of expand. contract(0) is 0.
//
// Find out: max may be 1e38 and min 1e-44. Which of your quotients and powers overflow or become 0 then?
//
// Float is precise enough: std::log2, std::exp2, std::rint, std::fabs, std::min, std::copysign.
#include "judge.h"

float expansion_exponent(float max, float min) {
    return 0;  // your code
}

float expand(float x, float max, float k) {
    return 0;  // your code
}

float contract(float y, float max, float k) {
    return 0;  // your code
}

int main() { return judge::expansion(expansion_exponent, expand, contract); }
