// 8 - COAT's linear layer: three GEMMs with one scale per tensor (lesson 5; about 20 minutes)
//
// x (tokens, in), w (out, in), and g (tokens, out), the gradient of the output. Set
//   y   (tokens, out)   the output                         fprop
//   dx  (tokens, in)    the gradient of x                  dgrad
//   dw  (out, in)       the gradient of w                  wgrad
// Every operand is quantized once, with one scale for the tensor: x and w in E4M3, g in E5M2.
//
// Find out: over which dimension does each GEMM sum, and which operands must be transposed for it? With one
// scale per tensor, does it matter whether a matrix is transposed before or after it is quantized?
//
// given:: has quantized(x) in E4M3 and quantized_e5m2(x), which encode and decode again (the scale is in the
// values), transposed(x), and product(a, b), which sums over a's columns and b's rows.
#include "judge.h"

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear(linear); }
