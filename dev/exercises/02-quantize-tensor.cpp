// 2 - Quantize a tensor with one scale (lesson 2; about 10 minutes)
//
// Find the scale s that maps the largest magnitude of the tensor onto 448, E4M3's largest value. Write the
// code of each of the n values, and return s. Codes are undefined before you write them.
//
// Watch for:
//   The largest magnitude may be that of a negative value.
//   A tensor of zeros has s = 1. Any other s is at least 2^-126 (0x1p-126f), so that 1 / s is finite.
//   Compute 1 / s once, in FP32, and multiply by it, as a GPU does: x / s may round to another code.
//
// given::encode(x) is the E4M3 code of x.
#include "judge.h"

float quantize_tensor(int n, const float* x, uint8_t* codes) {
    return 0;  // your code
}

int main() { return judge::quantize_tensor(quantize_tensor); }
