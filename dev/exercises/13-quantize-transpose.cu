// 13 - A kernel: quantize a matrix, and its transpose (lesson 5; about 60 minutes)
//
// Without nvcc the CPU runs your kernel, a thread after another, and the judge sees whether its results are
// right. (How fast it is, no exercise asks: the ladders do.) "CUDA on one page", dev/ladders/README.md, has
// the words.
//
// Backward needs codes in both orders, because Hopper's FP8 GEMMs read both operands along the dimension that
// they sum over. Write
//   codes[r * cols + c] = transposed[c * rows + r] = encode(x[r * cols + c] * inverse_scale)
//
// A block of 32 x 8 threads does a tile of 32 x 32 values: columns from 32 blockIdx.x on, rows from
// 32 blockIdx.y on. Neighbouring threads should use neighbouring addresses. So keep the codes of the tile in
// shared memory, and write both results row by row. (The first function of dev/ladders/layouts.py asks where
// each code of the tile lies.)
//
// Watch for:
//   Tiles at the right and at the bottom are cut off: rows and cols are no multiples of 32.
//   All threads of a block must have written the tile before one reads it: __syncthreads(), by all of them.
//
// __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3) is the code of x.
#include "judge.cuh"

__global__ void quantize_transpose(int rows, int cols, float inverse_scale, const float* x, uint8_t* codes,
                                   uint8_t* transposed) {
    // your code
}

int main() { return judge::quantize_transpose(launched(quantize_transpose)); }
