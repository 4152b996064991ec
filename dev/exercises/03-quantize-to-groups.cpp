// 3 - Quantize in 1x16 groups with BF16 scales (lesson 3; about 15 minutes)
//
// Inputs of norms and activation functions have a scale for each group, which is 16 neighbouring values of a
// row. cols may be no multiple of 16: then the last group of each row is shorter, and ends with the row.
// Write codes (rows, cols) and scales (rows, groups in a row), row by row; both are undefined before the
// call. The scale of a group is computed as in exercise 2, with the same rules for zeros, for the least s and
// for 1 / s. Then it is rounded to BF16.
//
// Find out: is the code made with the scale before or after rounding? Which of the two is known when codes
// are decoded?
//
// given::to_bf16(s) is s rounded to the nearest BF16, as a float; given::encode(x) is an E4M3 code.
#include "judge.h"

void quantize_to_groups(int rows, int cols, const float* x, uint8_t* codes, float* scales) {
    // your code
}

int main() { return judge::quantize_to_groups(quantize_to_groups); }
