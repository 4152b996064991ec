// 8 - The three GEMMs of a linear layer with 1x128 scales (section 5, and DeepSeek-V3)
//
// x (tokens, in), w (out, in), and g (tokens, out), the gradient of the output:
//   fprop  y = x w^T      dgrad  dx = g w      wgrad  dw = g^T x
// Every operand is quantized. For x and g, 128 values share a scale, and they must lie along the dimension
// that the GEMM sums over: then the scale is the same for 128 terms of the sum, and comes out of it as a
// factor. Each GEMM sums over another dimension: fprop over `in`, dgrad over `out`, wgrad over tokens. w has
// 128x128 blocks, the same for its transpose.
//
// Watch for:
//   given::quantized(x, 1, 128) makes blocks along the columns; the last may be shorter. wgrad needs them
//   along the rows: its operands have other codes than the same tensors in fprop and dgrad. GEMMs want the
//   dimension that they sum over contiguous. So transpose the tensor (not its FP8 values), quantize it, and
//   here transpose it back where the product needs that.
//
// Set y, dx and dw: y = given::product(a, b) is a b, and sums over a's columns and b's rows.
// given::quantized(x, rows, cols) encodes in E4M3 and decodes: scales are in its values.
// given::transposed(x).
#include "judge.h"

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear(linear); }
