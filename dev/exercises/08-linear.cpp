// 8 - The three GEMMs of a linear layer with 1x128 scales (section 5, and DeepSeek-V3)
//
// x (tokens, in), w (out, in), and g (tokens, out), the gradient of the output:
//   fprop  y = x w^T      dgrad  dx = g w      wgrad  dw = g^T x
// Every operand is quantized. In x and g, 128 values share a scale, along the dimension that the GEMM sums
// over: there it is a factor of 128 terms of the sum. fprop sums over `in`, dgrad over `out`, and wgrad over
// tokens. w has 128x128 blocks, the same for its transpose.
//
// Watch for:
//   given::quantized(x, 1, 128) makes blocks along the columns; the last may be shorter. wgrad needs them
//   along the rows, so its operands have other codes than in fprop and dgrad: transpose x and g themselves
//   (not their quantized values), quantize, and transpose back where the product needs that.
//
// Set y, dx and dw. given:: has transposed(x), product(a, b), which sums over a's columns and b's rows, and
// quantized(x, rows, cols), which encodes in E4M3 and decodes: scales are in its values.
#include "judge.h"

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear(linear); }
