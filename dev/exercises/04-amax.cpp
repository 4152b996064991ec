// 4 - The amax of a tensor by group scaling (lesson 10; about 10 minutes)
//
// Per-tensor scaling needs the largest |x| before the first code. Group scaling finds it in two stages: the
// largest magnitude of each 16 elements, then the largest of these. Write the first into maxima (it is
// undefined before), and return the second.
//
// Watch for:
//   The last group is shorter if n is no multiple of 16.
//   NaN must not get lost: a code would hide it. The maximum of a group with a NaN is infinity here.
//   A comparison with NaN is false. Which of std::max(largest, x) and std::max(x, largest) keeps it?
#include "judge.h"

float amax(int n, const float* x, float* maxima) {
    return 0;  // your code
}

int main() { return judge::amax(amax); }
