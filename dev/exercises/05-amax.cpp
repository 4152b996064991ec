// 5 - The amax of a tensor by group scaling (section 5.2)
//
// Per-tensor scaling needs the largest |x| before the first code. Group scaling finds it in two stages:
//   maxima[i] = the largest |x| of elements 16 i to 16 i + 15        amax = the largest of the maxima
// On a GPU the kernel that makes x takes the maxima: none reads x again. Write the maxima, and return amax.
//
// Watch for:
//   The last group is shorter if n is no multiple of 16.
//   NaN must not get lost: a code would hide it. The maximum of a group with a NaN is infinity here.
//   A comparison with NaN is false, so std::max(largest, x) drops it. std::isnan(x) finds it.
#include "judge.h"

float amax(int n, const float* x, float* maxima) {
    return 0;  // your code
}

int main() { return judge::amax(amax); }
