// 4 - The amax of a tensor by group scaling (lesson 10; about 10 minutes)
//
// Per-tensor scaling needs the largest |x| before the first code. Group scaling finds it in two stages: first
// the largest magnitude of each group of 16 elements, then the largest of these magnitudes. Write those of
// the groups into maxima, which is undefined before the call, and return the largest.
//
// Watch for:
//   The last group is shorter if n is no multiple of 16.
//   A NaN must not get lost, because a code would hide it. Here a group with a NaN has the maximum infinity.
//   A comparison with NaN is false. Does std::max(largest, x) or std::max(x, largest) keep it to the end?
#include "judge.h"

float amax(int n, const float* x, float* maxima) {
    return 0;  // your code
}

int main() { return judge::amax(amax); }
