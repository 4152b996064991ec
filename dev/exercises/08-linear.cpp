// 8 - COAT's linear layer: three GEMMs with one scale per tensor (lesson 5; about 25 minutes)
//
// gemm: c = a b^T. As a Hopper GPU's FP8 GEMM wants it, the sum goes along the rows of both matrices:
//   c (a.rows, b.rows)      c(i, j) = the sum over k of a(i, k) b(j, k)
// The value of a code is its matrix's scale times given::decode(format, code). Add up products of decoded
// codes, and multiply the sum by both scales once.
//
// linear: x is (tokens, in), w is (out, in), and g (tokens, out) is the gradient of the output. Use gemm for
//   y   (tokens, out)   the output                         fprop
//   dx  (tokens, in)    the gradient of x                  dgrad
//   dw  (out, in)       the gradient of w                  wgrad
// Every operand is quantized once, with one scale for the tensor: x and w in E4M3, g in E5M2.
//
// Find out: over which dimension does each GEMM sum, and which codes must be transposed for it? Would it
// matter if a matrix were transposed before it is quantized?
//
// given::quantize(E4M3, x) gives an Fp8Matrix (judge.h): rows, cols, format, scale and codes, row by row.
// given::transposed(q) is the transpose of an Fp8Matrix.
#include "judge.h"

Matrix gemm(const Fp8Matrix& a, const Fp8Matrix& b) {
    Matrix c{a.rows, b.rows, std::vector<float>(a.rows * b.rows)};
    return c;  // your code
}

void linear(const Matrix& x, const Matrix& w, const Matrix& g, Matrix& y, Matrix& dx, Matrix& dw) {
    // your code
}

int main() { return judge::linear(gemm, linear); }
