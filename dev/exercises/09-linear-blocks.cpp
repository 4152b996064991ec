// 9 - DeepSeek's linear layer: the same GEMMs with 1x128 scales (lesson 5; about 20 minutes)
//
// Set y (tokens, out), dx (tokens, in) and dw (out, in) from x (tokens, in), w (out, in) and g (tokens, out),
// as in lesson 5. Here 128 values of x and of g share a scale, along the dimension that the GEMM sums over,
// so that each scale is a factor of 128 terms of the sum. w has one scale for each block of 128x128. All
// three are in E4M3.
//
// For example, let x be (2, 256). quantized(x, 1, 128) has four scales, one for each half of a row.
// quantized(x, 128, 1) has 256 scales, one for each column of two values.
//
// Find out: which operands can be shared by two GEMMs now, and which have to be quantized twice?
//
// given::quantized(x, 1, 128) makes blocks of 128 neighbours in a row; the last may be shorter. given:: also
// has transposed(x), and product(a, b), which sums over a's columns and b's rows.
#include "judge.h"

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear_in_blocks(linear); }
