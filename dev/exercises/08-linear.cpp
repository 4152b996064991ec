// 8 - The three GEMMs of a linear layer with 1x128 scales (section 5, and DeepSeek-V3)
//
// x (tokens, in), w (out, in), and g (tokens, out), the gradient of the output:
//   fprop  y = x w^T      dgrad  dx = g w      wgrad  dw = g^T x
// Every operand is quantized. For x and g, 128 values share a scale, and they must lie along the dimension
// that the GEMM sums over: only then can the GEMM scale a partial sum. Each GEMM sums over another one:
// fprop over `in`, dgrad over `out`, wgrad over tokens. w has 128x128 blocks, the same for its transpose.
//
// Watch for:
//   given::quantized(x, 1, 128) makes blocks along the columns. So what is summed over its rows is transposed
//   first, then quantized: an operand of wgrad has other codes than the same tensor in fprop or dgrad.
//
// Set y, dx and dw. given::quantized(x, rows, cols) encodes and decodes; given::transposed(x);
// given::product(a, b) is a b.
#include "judge.h"

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear(linear); }
