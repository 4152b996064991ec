// 15 - Choose a format and scales (lessons 1 to 5; about 15 minutes)
//
// Each of six tensors (64 tokens x 256 features) is to be stored in FP8. Choose, on paper: E4M3 or E5M2? One
// scale for the tensor, or one for each 1x16 group? The judge stores it in all four ways, and measures the
// RMS of all values' relative errors. The least error wins; but groups, which take 12.5% more memory, must
// make the error at least a tenth smaller than it is with one scale.
//
//   A  values of a normal distribution with standard deviation 1
//   B  magnitudes anywhere from 2^-20 to 1: each power of two is as frequent as any other
//   C  magnitudes anywhere from 2^-10 to 1, in the same way
//   D  as A, but one feature is 1,000 times as large
//   E  as A, but each token is multiplied by another factor, from 2^-20 to 1
//   F  as A, but one feature is 100,000 times as large
//
// Find out: F has a surprise. Why does COAT not take what is best for F wherever it expects outliers?
#include "judge.h"

const judge::Choice CHOICES[6] = {
    {.format = nullptr, .groups = false},  // A: write &E4M3 or &E5M2, and true or false
    {.format = nullptr, .groups = false},  // B
    {.format = nullptr, .groups = false},  // C
    {.format = nullptr, .groups = false},  // D
    {.format = nullptr, .groups = false},  // E
    {.format = nullptr, .groups = false},  // F
};

int main() { return judge::choose(CHOICES); }
