// 3 - Quantize in 1x16 groups with BF16 scales (lesson 3; about 15 minutes)
//
// Inputs of norms and activation functions have a scale for each 16 neighbouring values of a row. Write codes
// (rows, cols) and scales (rows, groups in a row); both are undefined before. A group's scale is that of
// lesson 2 for its 16 values, s = amax / 448, rounded to BF16.
//
// Find out: is the code made with the scale before or after rounding? Which of the two does decoding have?
//
// Watch for:
//   The last group of a row may be shorter: none crosses to the next row.
//   The largest magnitude may be that of a negative value.
//   A group of zeros has s = 1. Any other s is at least 2^-126 (0x1p-126f), so that 1 / s is finite.
//   Compute 1 / s once, in FP32, and multiply by it, as a GPU does: x / s may round to another code.
//
// given::to_bf16(s) is s rounded to the nearest BF16, as a float; given::encode(x) is an E4M3 code.
#include "judge.h"

void quantize_groups(int rows, int cols, const float* x, uint8_t* codes, float* scales) {
    // your code
}

int main() { return judge::quantize_groups(quantize_groups); }
